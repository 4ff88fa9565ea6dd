"""DeepSeek's parts against what NumPy makes of their definitions; whole models: test_decoder.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import Experts, Latent, LayerConfig, ModelConfig
from kvjax.models.deepseek_attention import LatentAttention
from kvjax.models.deepseek_experts import ExpertsMLP, RoutedExperts, Router
from kvjax.models.rope import rotations

EXPERTS = Experts(layers=(0,), count=12, chosen=4, size=6, shared_size=5, scale=2.5)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(module, seed=0):
    """A module whose parameters are small random numbers."""
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    noise = [
        jnp.asarray(random(seed + n, *leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)
        for n, leaf in enumerate(leaves)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, noise))


def choice(experts, logits, bias):
    """One token's {expert: weight}, step by step as the papers say."""
    exponents = np.exp(logits - logits.max())
    scores = (
        1 / (1 + np.exp(-logits)) if experts.scores == "sigmoid" else exponents / exponents.sum()
    )
    rank = scores + bias
    members = np.arange(experts.count).reshape(experts.groups, -1)
    best = 2 if experts.routing == "noaux_tc" else 1
    worth = [np.sort(rank[group])[::-1][:best].sum() for group in members]
    groups = np.argsort(worth)[::-1][: experts.chosen_groups]
    eligible = sorted(members[groups].reshape(-1), key=lambda one: -rank[one])
    weights = {int(one): scores[one] for one in eligible[: experts.chosen]}
    total = sum(weights.values()) if experts.normalize else 1
    return {one: experts.scale * weight / total for one, weight in weights.items()}


ROUTINGS = [
    ("greedy", 1, 1),
    ("group_limited_greedy", 4, 2),
    ("group_limited_greedy", 3, 1),
    ("noaux_tc", 1, 1),
    ("noaux_tc", 4, 2),
    ("noaux_tc", 6, 6),
]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("routing", "groups", "chosen_groups"), ROUTINGS)
def test_a_router_chooses_and_weighs(scores, routing, groups, chosen_groups):
    for normalize in (False, True):
        experts = dataclasses.replace(
            EXPERTS,
            scores=scores,
            routing=routing,
            groups=groups,
            chosen_groups=chosen_groups,
            normalize=normalize,
        )
        router = filled(Router(16, experts))
        x = random(9, 20, 16)
        chosen, weights = router(jnp.asarray(x))
        bias = 0 if router.bias is None else np.asarray(router.bias[...])
        for row, logits in enumerate(x @ np.asarray(router.weight[...]).T):
            expected = choice(experts, logits, bias)
            got = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
            assert got == pytest.approx(expected, abs=1e-5)


def test_a_bias_decides_between_experts_and_weighs_nothing():
    router = Router(16, dataclasses.replace(EXPERTS, scores="sigmoid", routing="noaux_tc"))
    router.bias[...] = jnp.arange(12.0)
    chosen, weights = router(jnp.zeros((1, 16)))
    assert chosen.tolist() == [[11, 10, 9, 8]]
    np.testing.assert_allclose(weights, 2.5 * 0.5)


def mlp(x, gate, up, down):
    hidden = x @ gate.T
    return (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T


CHOICES = {
    "one token": np.array([[3, 0]]),
    "all the same": np.tile([[5, 2]], (40, 1)),
    "each its own": np.arange(12).reshape(6, 2),
    "mixed": np.stack([np.random.default_rng(n).permutation(12)[:5] for n in range(37)]),
    "many": np.stack([np.random.default_rng(n).permutation(12)[:3] for n in range(700)]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_token_goes_through_all_of_its_experts(name):
    chosen = CHOICES[name]
    experts = filled(RoutedExperts(8, EXPERTS, "silu", jnp.float32))
    stacks = [np.asarray(part[...]) for part in (experts.gate, experts.up, experts.down)]
    x, weights = random(1, len(chosen), 8), random(2, *chosen.shape)
    expected = np.zeros_like(x)
    for (row, n), expert in np.ndenumerate(chosen):
        expected[row] += weights[row, n] * mlp(x[row], *(stack[expert] for stack in stacks))
    run = jax.jit(lambda *given: experts(*given))
    got = run(jnp.asarray(x), jnp.asarray(chosen, jnp.int32), jnp.asarray(weights))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_bfloat16_stacks_stay_bfloat16():
    """A CPU program that converted whole stacks first would read all experts in every step."""
    wide = dataclasses.replace(EXPERTS, size=48)
    graphdef, params = nnx.split(RoutedExperts(64, wide, "silu", jnp.bfloat16))
    given = (params, jnp.zeros((2, 64)), jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4)))
    run = jax.jit(lambda params, *given: nnx.merge(graphdef, params)(*given))
    program = run.lower(*given).compile().as_text()
    (loop,) = [line for line in program.splitlines() if " while(" in line]
    assert "bf16[12,48,64]" in loop
    assert "f32[12,48,64]" not in loop


def test_shared_experts_are_added():
    layer = filled(ExpertsMLP(8, EXPERTS, "silu", jnp.float32))
    x = jnp.asarray(random(3, 7, 8))
    shared = layer.shared
    parts = [np.asarray(part.weight[...]) for part in (shared.gate, shared.up, shared.down)]
    both, routed = jax.jit(lambda x: (layer(x), layer.experts(x, *layer.router(x))))(x)
    np.testing.assert_allclose(both - routed, mlp(np.asarray(x), *parts), atol=1e-5)
    alone = ExpertsMLP(8, dataclasses.replace(EXPERTS, shared_size=0), "silu", jnp.float32)
    assert alone.shared is None


def latent_layer(**how):
    latent = Latent(**{"rank": 12, "rope_dim": 6, "value_dim": 5, "query_rank": 10, **how})
    return LayerConfig(num_heads=3, num_kv_heads=3, head_dim=14, latent=latent)


def attention(layer, seed=0):
    config = ModelConfig("deepseek_v3", 16, 24, 32, (layer,), max_context=64)
    return config, filled(LatentAttention(config, layer, jnp.float32), seed)


@pytest.mark.parametrize("query_rank", [None, 10])
def test_expanded_attention_equals_absorbed(query_rank):
    """Scores and values of latents alone, up-projections on the side of queries and outputs."""
    layer = latent_layer(query_rank=query_rank)
    config, module = attention(layer)
    x, turn = jnp.asarray(random(5, 9, 24)), rotations(layer, jnp.arange(9, dtype=jnp.int32))
    own, turned = map(np.asarray, module.queries(x, turn))
    latent, rotated = map(np.asarray, module.latents(x, turn))
    assert (latent.shape, rotated.shape) == ((9, 12), (9, 6))
    k_up = np.asarray(module.k_up.weight[...]).reshape(3, 8, 12)
    v_up = np.asarray(module.v_up.weight[...]).reshape(3, 5, 12)
    scores = np.einsum("thn,hnr,sr->hts", own, k_up, latent)
    scores += np.einsum("thd,sd->hts", turned, rotated)
    weights = np.exp(scores * config.scale(0))
    weights /= weights.sum(axis=-1, keepdims=True)
    absorbed = np.einsum("hts,sr,hvr->thv", weights, latent, v_up)

    def attend(index, q, k, v, state):
        assert (q.shape, k.shape, v.shape) == ((9, 3, 14), (9, 3, 14), (9, 3, 5))
        scores = jnp.einsum("thd,shd->hts", q, k) * config.scale(index)
        return jnp.einsum("hts,shv->thv", jax.nn.softmax(scores, axis=-1), v), state

    class KeepsLatents:
        def __call__(self, *expanded):
            pytest.fail("keys and values were made")

        def latents(self, index, q, q_rope, latent, rotated, state):
            assert (q.shape, q_rope.shape) == ((9, 3, 12), (9, 3, 6))
            scores = jnp.einsum("thr,sr->hts", q, latent)
            scores += jnp.einsum("thd,sd->hts", q_rope, rotated)
            weights = jax.nn.softmax(scores * config.scale(index), axis=-1)
            return jnp.einsum("hts,sr->thr", weights, latent), state

    expected = absorbed.reshape(9, -1) @ np.asarray(module.o.weight[...]).T
    for seen in (attend, KeepsLatents()):
        np.testing.assert_allclose(module(0, x, turn, seen, None)[0], expected, atol=1e-5)


def test_a_latent_norm_has_its_own_epsilon():
    config, module = attention(latent_layer())
    other = dataclasses.replace(config, norm_eps=0.5)
    assert LatentAttention(other, config.layers[0], jnp.float32).kv_norm.eps == module.kv_norm.eps


def test_interleaved_pairs_are_halves_in_another_order():
    order = np.array([0, 2, 4, 1, 3, 5])
    layer, plain = latent_layer(query_rank=None), latent_layer(query_rank=None, interleaved=False)
    module, other = attention(layer)[1], attention(plain)[1]
    rows = np.arange(42).reshape(3, 14)
    rows[:, 8:] = rows[:, 8:][:, order]
    other.q.weight[...] = module.q.weight[...][rows.reshape(-1)]
    down = np.concatenate([np.arange(12), 12 + order])
    other.kv_down.weight[...] = module.kv_down.weight[...][down]
    x, turn = jnp.asarray(random(5, 4, 24)), rotations(layer, jnp.arange(4, dtype=jnp.int32))
    for part in ("queries", "latents"):
        for mine, others in zip(
            getattr(module, part)(x, turn), getattr(other, part)(x, turn), strict=True
        ):
            np.testing.assert_array_equal(mine, others)
