"""Tiny random models of every kind, and attention without pages to compare with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.model import Model, from_checkpoint
from kvjax.models import (
    Latent,
    LayerConfig,
    ModelConfig,
    causal_attend,
    contiguous_attend,
    contiguous_cache,
    random_checkpoint,
)

VOCAB = 64


def config(*layers, **options):
    """A two-layer configuration; `layers` are the layers' attention if it is not plain."""
    layers = layers or (LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8),) * 2
    fields = {"intermediate_size": 48, "max_context": 1024, "tie_embeddings": True, **options}
    return ModelConfig(
        architecture="tiny", vocab_size=VOCAB, hidden_size=32, layers=layers, **fields
    )


def attention(heads=4, kv_heads=2, head_dim=8, window=None, **options):
    return LayerConfig(heads, kv_heads, head_dim, window, **options)


CONFIGS = {
    "llama": config(),
    "mistral": config(attention(window=21), attention(window=21)),
    "gemma": config(
        attention(4, 1, window=12),
        attention(4, 1, rope_theta=1e6),
        qk_norm=True,
        post_norms=True,
        embed_scale=32**0.5,
        attn_scale=0.4,
        activation="gelu_tanh",
    ),
    "soft_caps": config(attn_soft_cap=0.7, final_soft_cap=3.0, qkv_bias=True),
    "mha": config(attention(3, 3), attention(3, 3), tie_embeddings=False),
    "groups_of_3": config(attention(6, 2, 8), attention(3, 1, 16), qk_norm=True),
}

LATENTS = config(
    LayerConfig(3, 3, 10, latent=Latent(10, 4, 14)),
    LayerConfig(3, 3, 12, latent=Latent(13, 6, 8, normalized=False, biases=True)),
)
"""Layers that keep latents of two sizes; the second one as conversion makes them."""


def model(name="llama", dtype="float32") -> Model:
    """A model with random weights, larger than usual so that its choices are not near ties."""
    made = LATENTS if name == "latents" else CONFIGS[name]
    checkpoint = random_checkpoint(made, seed=7)
    for weight, value in checkpoint.weights.items():
        if "norm" not in weight:
            value *= 2
    return from_checkpoint(checkpoint, name=name, dtype=dtype)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _no_cache(graphdef, config, params, tokens):
    decoder = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    attend = causal_attend(config, jnp.zeros_like(tokens), positions)
    return decoder.logits(decoder(tokens, positions, attend, None)[0])


def no_cache_logits(of, ids):
    """float32 [T, V], all tokens at once, without a cache.

    What pads the stream to one of few lengths comes after everything that looks back.
    """
    tokens = jnp.asarray([*ids, *[0] * (-len(ids) % 64)], jnp.int32)
    return np.asarray(_no_cache(of.graphdef, of.config, of.params, tokens))[: len(ids)]


def contiguous_logits(of, ids, chunk):
    """The same through a contiguous cache, a chunk at a time (a multiple of it long)."""

    @jax.jit
    def step(params, tokens, positions, cache):
        decoder = nnx.merge(of.graphdef, params)
        attend = contiguous_attend(of.config, jnp.zeros_like(tokens), positions)
        hidden, cache = decoder(tokens, positions, attend, cache)
        return decoder.logits(hidden), cache

    cache, rows = contiguous_cache(of.config, 1, len(ids)), []
    for begin in range(0, len(ids), chunk):
        positions = jnp.arange(begin, begin + chunk, dtype=jnp.int32)
        tokens = jnp.asarray(ids[begin : begin + chunk], jnp.int32)
        logits, cache = step(of.params, tokens, positions, cache)
        rows.append(np.asarray(logits))
    return np.concatenate(rows)


def logprobs(logits, ids):
    """float64 [T - 1], log p(token | tokens before it)."""
    rows = np.asarray(logits, np.float64)[:-1]
    rows = rows - rows.max(1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    return rows[np.arange(len(ids) - 1), ids[1:]]
