"""How much each pair of a model's keys needs its rotation, measured on a text.

A pair of elements that RoPE turns is one complex number z, and its rotation a factor of modulus 1.
So the same pair of all KV heads may be mixed by any complex matrix before or after it is turned:
that is what makes one shared rotated part of several heads (TransMLA, arXiv:2502.07864, section
4.2, mixes by real rotations).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32, PRNGKeyArray

from kvjax.convert.surprise import sampled_surprise
from kvjax.models import Decoder, LayerConfig, causal_attend
from kvjax.models.rope import rotate, rotations


class RotationNeeds(NamedTuple):
    """Sums over a text's tokens, of one layer; G KV heads, `half` pairs a head.

    A query's score of a token is the real part of a sum over pairs of conj(q) z. What a change of
    scores costs, to first order, is linear in it: with S the loss's gradient by scores, a token's
    `moves` are a = conj(q) sum_n S_n z_n of turned numbers, and b, the same of others that are not.
    """

    keys: Float32[Array, "half 2 G G"]  # real and imaginary parts of z conj(z), over KV heads
    slopes: Float32[Array, "half G"]  # squares of the loss's gradient by keys
    moves: Float32[Array, "H half J J"]  # products of [Re a, Im a, Re b, Im b], J = 4 G


def rotation_needs(
    graphdef: Any, params: Any, tokens: Int32[Array, " T"], key: PRNGKeyArray
) -> tuple[RotationNeeds, ...]:
    """Run a text and go back: one `RotationNeeds` a layer.

    Args:
      graphdef: of a model without latents or windows.
      params: its weights.
      tokens: int32 [T], a text of its own.
      key: of the tokens that the loss draws.
    """
    decoder: Decoder = nnx.merge(graphdef, params)
    config, count = decoder.config, tokens.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    plain = causal_attend(config, jnp.zeros_like(tokens), positions)

    def loss(moves: list[Array]) -> tuple[Array, tuple[tuple[Array, ...], ...]]:
        def attend(
            layer: int, q: Array, k: Array, v: Array, seen: tuple[tuple[Array, ...], ...]
        ) -> tuple[Array, tuple[tuple[Array, ...], ...]]:
            out, _ = jax.checkpoint(functools.partial(plain, layer))(q, k, v, None)
            return out + moves[layer], (*seen, (q, k, v, out))

        nothing: tuple[tuple[Array, ...], ...] = ()
        hidden, seen = decoder(tokens, positions, attend, nothing)
        return sampled_surprise(decoder, hidden, key), seen

    still = [
        jnp.zeros((count, layer.num_heads, layer.value_dim), jnp.float32) for layer in config.layers
    ]
    slopes, seen = jax.grad(loss, has_aux=True)(still)
    return tuple(
        _needs(layer, config.scale(index), positions, seen[index], slopes[index])
        for index, layer in enumerate(config.layers)
    )


def _needs(
    layer: LayerConfig,
    base_scale: float,
    positions: Int32[Array, " T"],
    seen: tuple[Array, ...],
    slope: Float32[Array, "T H Dv"],
) -> RotationNeeds:
    """Of one layer: turned queries [T, H, D] and keys [T, G, D], values, and what came of them."""
    q, k, v, out = seen
    cosines, sines = rotations(layer, positions)
    sharpen = cosines[0, 0]  # the cosine of position 0: what yarn multiplies both sides by
    scale = base_scale * sharpen * sharpen
    q, k = q / sharpen, k / sharpen
    q_still = rotate(q, cosines / sharpen, -sines / sharpen)
    k_still = rotate(k, cosines / sharpen, -sines / sharpen)
    visible = positions[:, None] >= positions[None, :]
    count, groups, dim = k.shape
    half = dim // 2

    def of_head(head: tuple[Array, ...]) -> tuple[Array, Array]:
        q, q_still, own_k, own_v, out, slope = head
        scores = jnp.where(visible, scale * _product(q, own_k.T), -jnp.inf)
        by_weight = _product(slope, own_v.T) - jnp.sum(slope * out, axis=1, keepdims=True)
        by_score = jax.nn.softmax(scores, axis=1) * by_weight * scale

        def moved(q: Array, keys: Array) -> list[Array]:
            sums = _product(by_score, keys.reshape(count, -1)).reshape(count, groups, dim)
            (q1, q2), (s1, s2) = jnp.split(q[:, None], 2, axis=2), jnp.split(sums, 2, axis=2)
            return [q1 * s1 + q2 * s2, q1 * s2 - q2 * s1]

        parts = jnp.concatenate([*moved(q, k), *moved(q_still, k_still)], axis=1)  # [T, J, half]
        return jnp.einsum("tif,tjf->fij", parts, parts), _product(by_score.T, q)

    def by_head(x: Array) -> Array:
        return jnp.moveaxis(x, 1, 0)

    own = functools.partial(jnp.repeat, repeats=q.shape[1] // groups, axis=0)
    moves, by_key = jax.lax.map(
        of_head,
        (
            by_head(q),
            by_head(q_still),
            own(by_head(k)),
            own(by_head(v)),
            by_head(out),
            by_head(slope),
        ),
    )
    by_key = by_key.reshape(groups, -1, count, 2, half).sum(axis=1)
    slopes = jnp.square(by_key).sum(axis=(1, 2)).T
    first, second = jnp.split(k_still, 2, axis=2)
    same = functools.partial(jnp.einsum, "tgf,thf->fgh")
    real = same(first, first) + same(second, second)
    imaginary = same(second, first) - same(first, second)
    return RotationNeeds(jnp.stack([real, imaginary], axis=1), slopes, moves)


def _product(a: Float32[Array, "I K"], b: Float32[Array, "K J"]) -> Float32[Array, "I J"]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
