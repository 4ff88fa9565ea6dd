"""What is measured of a model, against attention written out with complex numbers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.convert.compress import principal_axes
from kvjax.convert.heal import smoothed
from kvjax.convert.latents_seen import LatentsSeen, token_weights
from kvjax.convert.pairs import mixed_pairs
from kvjax.convert.plot import can_plot, plot_losses
from kvjax.convert.rotation_needs import rotation_needs
from kvjax.convert.surprise import sampled_surprise
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, random_checkpoint
from tests.kvjax.decode.tiny import config, prompt

HEADS, GROUPS, DIM, TOKENS = 4, 2, 8, 20
HALF = DIM // 2


@pytest.fixture(scope="module")
def seen():
    """Of one layer: needs, and what the definition says they are made of."""
    layer = LayerConfig(HEADS, GROUPS, DIM, rope_theta=50.0)
    model = from_checkpoint(random_checkpoint(config(layer), seed=2), name="one", dtype="float32")
    tokens, key = jnp.asarray(prompt(TOKENS), jnp.int32), jax.random.key(3)
    (needs,) = jax.jit(rotation_needs, static_argnums=0)(model.graphdef, model.params, tokens, key)

    def loss(extra):
        """With something added to each score."""
        decoder = nnx.merge(model.graphdef, model.params)

        def attend(index, q, k, v, state):
            k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
            scores = jnp.einsum("thd,shd->hts", q, k) * DIM**-0.5 + extra
            scores = jnp.where(jnp.tri(TOKENS, dtype=bool)[None], scores, -jnp.inf)
            out = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v)
            return out, (q, k[:, ::2])

        positions = jnp.arange(TOKENS, dtype=jnp.int32)
        hidden, parts = decoder(tokens, positions, attend, None)
        return sampled_surprise(decoder, hidden, key), parts

    extra = jnp.zeros((HEADS, TOKENS, TOKENS))
    slope, parts = jax.jit(jax.grad(loss, has_aux=True))(extra)
    q, k = (np.asarray(x[..., :HALF]) + 1j * np.asarray(x[..., HALF:]) for x in parts)
    angle = np.arange(TOKENS)[:, None] * 50.0 ** (-np.arange(HALF) / HALF)
    return needs, np.asarray(slope) * DIM**-0.5, q, k, np.exp(-1j * angle)[:, None]


def moved(slope, q, k):
    """conj(q) times what the loss moves each query's sum of keys by: [T, H, G, half]."""
    sums = np.einsum("hts,sgf->thgf", slope, k)
    return q.conj()[:, :, None] * sums


def test_sums_are_those_of_the_definition(seen):
    needs, slope, q, k, back = seen
    z = k * back
    expected = np.einsum("tgf,thf->fgh", z, z.conj())
    got = np.asarray(needs.keys)
    np.testing.assert_allclose(got[:, 0] + 1j * got[:, 1], expected, atol=1e-5)
    by_key = np.einsum("hts,thf->hsf", slope, q).reshape(GROUPS, 2, TOKENS, HALF).sum(axis=1)
    expected = np.square(np.abs(by_key)).sum(axis=1).T
    np.testing.assert_allclose(needs.slopes, expected, rtol=1e-3, atol=1e-9)
    a, b = moved(slope, q, k), moved(slope, q * back, k * back)
    parts = np.concatenate([a.real, a.imag, b.real, b.imag], axis=2)
    expected = np.einsum("thif,thjf->hfij", parts, parts)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(needs.moves, expected, atol=1e-4 * scale)


def test_what_stands_for_a_rotation_is_the_best_constant(seen):
    needs, slope, q, k, back = seen
    pairs = mixed_pairs(needs)
    for frequency in range(HALF):
        inverse = pairs.mix[frequency] @ pairs.unmix[frequency]
        np.testing.assert_allclose(inverse, np.eye(GROUPS), atol=1e-9)

    def by_pair(query, keys):
        """What the loss moves by through each mixed pair: [T, H, half, G]."""
        mixed = np.einsum("fjg,tgf->tfj", pairs.mix, keys)
        sums = np.einsum("hts,sfj->thfj", slope, mixed)
        own = pairs.unmix[:, np.arange(HEADS) // 2].swapaxes(0, 1)
        return query.conj()[..., None] * own[None] * sums

    turned, still = by_pair(q, k), by_pair(q * back, k * back)
    np.testing.assert_allclose(pairs.whole, np.square(turned.real).sum(axis=(0, 1)), rtol=1e-3)

    def left(factor):
        return np.square(turned.real - (factor[None] * still).real).sum(axis=(0, 1))

    most = pairs.whole.max()
    np.testing.assert_allclose(pairs.lost, left(pairs.turn), rtol=2e-2, atol=1e-3 * most)
    for change in (0.05, 0.05j, -0.05, -0.05j):
        assert np.all(left(pairs.turn * (1 + change)) >= left(pairs.turn) * (1 - 1e-4))
    assert np.all(pairs.lost <= pairs.whole)


def test_tokens_weigh_as_much_as_the_loss_depends_on_them():
    """Whatever the scales of elements; what depends on nothing still weighs something."""
    random = np.random.default_rng(1)
    expected = np.concatenate([[300.0, 20.0], np.full(97, 1.0), [0.0]])
    slope = random.standard_normal((100, 400)) * 10.0 ** random.uniform(-3, 3, 400)
    found = np.asarray(token_weights(jnp.asarray(np.sqrt(expected)[:, None] * slope, jnp.float32)))
    assert found.mean() == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(found[:-1] / found[2:-1].mean(), expected[:-1], rtol=0.35)
    assert 0 < found[-1] < found[2:-1].min()


def test_the_first_axes_are_the_best_that_there_are():
    """An error costs e F e / 2; no other three directions leave less of it."""
    random = np.random.default_rng(0)
    latents = random.standard_normal((4000, 6)) @ random.standard_normal((6, 6)) + 3.0
    slopes = random.standard_normal((4000, 6)) @ random.standard_normal((6, 6))
    axes = principal_axes(
        LatentsSeen(latents.sum(axis=0), latents.T @ latents, slopes.T @ slopes), 4000
    )
    fisher = slopes.T @ slopes / 4000
    centred = latents - axes.mean
    np.testing.assert_allclose(axes.up @ axes.down, np.eye(6), atol=1e-6)

    def cost(down, up):
        error = centred - centred @ down.T @ up.T
        return np.einsum("ti,ij,tj->t", error, fisher, error).mean() / 2

    best = cost(axes.down[:3], axes.up[:, :3])
    assert best == pytest.approx(axes.costs[3:].sum(), rel=1e-2)
    assert cost(axes.down, axes.up) == pytest.approx(0, abs=1e-6)
    for _ in range(50):
        down = axes.down[:3] + 0.1 * random.standard_normal((3, 6)) * np.abs(axes.down[:3]).mean()
        codes = centred @ down.T
        up = np.linalg.lstsq(codes, centred, rcond=None)[0].T
        assert cost(down, up) > best * 0.999


def test_losses_are_smoothed_and_drawn(tmp_path):
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]
    if not can_plot():
        pytest.skip("matplotlib is not installed")
    plot_losses(tmp_path / "loss.png", [0.5, 0.4, 0.3])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
