"""What both forms of attention to latents cost is what their products cost, and they are equal."""

import numpy as np
import pytest

from benchmarks import latents_cost
from benchmarks.latents_cost import TINY

QUERIES, CONTEXT = 8, 256


def products(form):
    """Operations of the matrix products, causality or not."""
    latent, rope, nope, value = TINY.dims
    pairs = QUERIES * CONTEXT
    if form == "absorbed":
        of_head = pairs * (2 * latent + rope) + QUERIES * latent * (nope + value)
    else:
        of_head = pairs * (nope + rope + value) + CONTEXT * latent * (nope + value)
    return 2 * TINY.heads * of_head


@pytest.mark.parametrize("form", latents_cost.FORMS)
def test_products_are_most_of_what_is_counted(form):
    operations, moved = latents_cost.counted(TINY, QUERIES, CONTEXT, form)
    assert products(form) < operations < 1.2 * products(form)
    assert moved > 4 * CONTEXT * (TINY.dims.latent + TINY.dims.rope)


def test_what_the_cost_model_picks_is_ours():
    arithmetic, moved = latents_cost.counted_rows(TINY, 1, CONTEXT)
    assert arithmetic.claim == "tiny, 1 query, 256 tokens: absorbed"
    assert (arithmetic.baseline, arithmetic.met) == ("expanded", True)
    assert moved.ours < moved.baseline_value


def test_what_is_timed_is_the_same_attention():
    absorbed, expanded = latents_cost.prefills(TINY, 2 * latents_cost.CHUNK).values()
    np.testing.assert_allclose(absorbed(), expanded(), atol=1e-4)
