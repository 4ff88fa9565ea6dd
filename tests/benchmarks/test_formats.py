"""The benchmark of formats: its claims, from points that were never measured, and its parts."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import formats, formats_timing
from benchmarks.formats_claims import EXACTLY, HEADINGS, OURS, STORED, Point, claims, lines
from benchmarks.formats_measure import against, encoded_after, run
from benchmarks.formats_methods import BF16, METHODS
from benchmarks.formats_plot import plot
from kvjax.config import CacheConfig
from kvjax.formats import NAMED
from tests.kvjax.decode import tiny


def a_point(name, share, kl, engine=OURS, **fields):
    given = {
        "context": 4096,
        "read": STORED,
        "bytes_per_token": 23040 * share,
        "agrees": 0.99,
        "right": 4,
        "exact_right": 4,
        "questions": 4,
    }
    return Point(name=name, share=share, kl=kl, engine=engine, **(given | fields))


def test_aims_are_judged_at_their_bytes():
    points = [
        a_point(BF16, 1.0, 1e-5),
        a_point("fp8-calibrated", 0.5, 0.002),
        a_point("int4", 0.297, 0.006),
        a_point("int3", 0.24, 0.02, right=3),
        a_point("int4-int2", 0.25, 0.01),
    ]
    rows = {(row.claim.partition(", ")[2], row.metric): row for row in claims(points)}
    assert rows["fp8-calibrated", "bytes a token"].met
    assert rows["fp8-calibrated", "KL over questions"].met
    assert rows["int4", "bytes a token"].met
    assert rows["int4", "KL over questions"].met is False
    best = "the best of 4 bits or fewer (int4-int2)"
    assert rows[best, "KL over questions"].met
    assert rows[best, "needles answered"].met


def test_a_peer_is_compared_with_our_best_of_as_many_bytes():
    points = [
        a_point("int8", 0.52, 0.0001),
        a_point("int4", 0.28, 0.004),
        a_point("int3", 0.24, 0.02),
        a_point("f16", 1.0, 0.0, "llama.cpp"),
        a_point("q4_0", 0.281, 0.02, "llama.cpp"),
        a_point("tiny", 0.1, 0.02, "llama.cpp"),
    ]
    (row,) = (row for row in claims(points) if row.baseline == "llama.cpp q4_0")
    assert row.claim.startswith("4,096 tokens, int4 in ")
    assert row.ratio == pytest.approx(0.2)
    assert row.met


def test_a_peer_is_compared_with_documents_that_were_read_alike():
    points = [
        a_point("int4", 0.28, 0.004),
        a_point("int4", 0.28, 0.002, read=EXACTLY),
        a_point("4 bits", 0.3, 0.02, "transformers", read=EXACTLY),
    ]
    (row,) = (row for row in claims(points) if row.baseline == "transformers 4 bits")
    assert row.ours == 0.002


def test_a_line_has_a_cell_for_every_heading():
    whole = a_point("int4", 0.3, 0.004, attention_us=2.0, bf16_attention_us=1.0, recent=1e5)
    for line in lines([a_point("q4_0", 0.3, 0.1), whole]):
        assert len(line) == len(HEADINGS)
    assert "2.00" in lines([whole])[0]


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot([a_point("int4", 0.3, 0.004), a_point("q4", 0.3, 0.1, "x")], tmp_path / "a.png", "model")
    assert (tmp_path / "a.png").stat().st_size


def test_all_named_formats_are_compared():
    assert set(NAMED) <= set(METHODS)
    assert formats.parse([]).formats == list(METHODS)
    assert formats.parse(["--quick"]).peers == []
    with pytest.raises(SystemExit):
        formats.parse(["--formats", "kvquant4"])


@pytest.mark.slow
def test_a_cache_in_fewer_bits_is_judged_by_an_exact_one():
    model, method = tiny.model("llama"), METHODS["int2"]
    document = np.random.default_rng(0).integers(0, tiny.VOCAB, 80).tolist()
    question = document[:9]
    exact = run(model, document, [question], CacheConfig(), lambda text: None)
    coarse = encoded_after(model, exact, method, [question], lambda text: None)
    none, some = (
        against(model, exact.questions[0], other.questions[0], [*question[1:], 0])
        for other in (exact, coarse)
    )
    assert (none.kl, none.agrees) == (0, 1)
    assert 0 < some.kl < 10
    spec = dataclasses.replace(model.spec, dtype="bfloat16")
    first = 16 * spec.bytes_per_token / 64  # a page that stays, over all but the newest page
    assert coarse.kept.per_token == method.format.bytes_per_token(spec, 16) + first
    assert coarse.kept.recent == 16 * exact.kept.per_token / 2


@pytest.mark.slow
def test_times_are_those_of_all_layers():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2 * 64, 2, 8)), jnp.float32)
    config, method = tiny.CONFIGS["llama"], METHODS["int4"]
    tokens = formats_timing.Tokens(rows, rows, 2)
    times = formats_timing.measure(tokens, config, method.format, method.page_size, repeats=1)
    assert times.attention > 0
    assert times.encode > 0


def test_points_are_written_as_they_come(tmp_path):
    keep = formats.Keeper([], tmp_path / "points")
    keep(a_point("int4", 0.3, 0.004), a_point("int3", 0.3, 0.004))
    keep.time(1, attention_us=2.0)
    found = json.loads((tmp_path / "points").read_text())
    assert [p["attention_us"] for p in found] == [None, 2.0]
