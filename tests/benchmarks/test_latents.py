"""The benchmark of latents: sizes, rows and aims."""

import dataclasses

from benchmarks import latents
from kvjax.convert import Judgement
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from tests.kvjax.decode.tiny import config

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
