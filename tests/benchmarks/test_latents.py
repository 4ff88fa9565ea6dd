"""The benchmark of latents: sizes, rows and aims."""

import dataclasses
import math

import numpy as np
import pytest

import kvjax
from benchmarks import latents, latents_formats
from kvjax.convert import Judgement
from kvjax.formats import int4
from kvjax.model import from_checkpoint
from kvjax.models import Latent, LayerConfig, random_checkpoint
from tests.kvjax.decode.tiny import config, prompt

GOOD = Judgement(kl=0.01, perplexity=10.2, original_perplexity=10.0, agreement=0.9, tokens=100)
BAD = dataclasses.replace(GOOD, kl=0.3, perplexity=12.0)


def point(share, **healed):
    return latents.Point(share, 12, 4, 128, 256, BAD, BAD, 1.0, **healed)


def test_sizes_take_the_share_of_the_bytes():
    model = from_checkpoint(random_checkpoint(config()), name="tiny")  # 32 elements a layer
    assert latents.sizes(model, 1.0, 0.25) == (16, 16)
    assert latents.sizes(model, 0.75, 0.25) == (18, 6)
    assert latents.sizes(model, 0.5, 0.25) == (12, 4)


def test_what_is_aimed_at_is_aimed_at_after_healing_only():
    rows = latents.rows_of([point(0.5, healed=GOOD, other_healed=BAD), point(0.25)])
    aimed = [(row.metric, row.met) for row in rows if row.aim is not None]
    assert aimed == [
        ("stored of a token", True),
        ("perplexity, healed", True),
        ("stored of a token", False),
    ]
    table = latents.curve([point(0.5, healed=GOOD, other_healed=BAD), point(0.25)])
    assert "| 50.0% | 12 + 4 | 0.3000 | 0.0100 | +20.0% | +2.0% | +20.0% | +20.0% |" in table
    assert "| 25.0% | 12 + 4 | 0.3000 | - | +20.0% | - | +20.0% | - |" in table


def test_quick_is_one_size_and_two_steps():
    options = latents.parse(["--quick"])
    assert (tuple(options.shares), options.steps) == ((0.5,), 2)
    assert latents.parse([]).shares == latents.SHARES


@pytest.mark.slow
def test_what_is_judged_in_a_format_is_what_is_scored_in_it(monkeypatch):
    monkeypatch.setattr(latents_formats, "FORMATS", ("int4",))
    layer = LayerConfig(4, 4, 12, latent=Latent(12, 4, 8))
    original, model = (
        from_checkpoint(random_checkpoint(made, seed=7), name="tiny")
        for made in (config(), config(layer, layer))
    )
    windows = np.asarray([prompt(80)], np.int32)
    (found,) = latents_formats.in_formats(original, model, "latents", windows, windows, str)
    cache = kvjax.CacheConfig(format="int4")
    score = kvjax.score(model, windows[0].tolist(), cache=cache)
    assert found.judged.perplexity == pytest.approx(score.perplexity, rel=1e-4)
    assert found.bytes == score.stats.bytes_per_token == int4().bytes_per_token(model.spec, 16)
    assert found.share == found.bytes / (2 * 2 * 2 * 8 * 2)  # bytes in bfloat16
    assert found.judged.kl > found.added > 0
    rows = latents_formats.rows_of([found])
    assert [row.metric for row in rows[-2:]] == ["KL", "KL of the format alone"]
    assert not math.isnan(rows[-1].ours)
    assert "| latents | int4 |" in latents_formats.table([found])
