"""Ratios, fits and token comparisons of the decode benchmark, from made-up answers."""

import pytest

from benchmarks.decode_rows import agreement, comparison_rows, fit, measurements
from benchmarks.engines import Engine, Outcome, choose


def outcome(name, greedy, dtype="float32", **extra):
    point = {
        "context": 512,
        "batch": 1,
        "decode_tokens_per_s": 10.0,
        "prefill_tokens_per_s": 400.0,
        "step_ms": 100.0,
        "greedy": greedy,
    }
    return Outcome(Engine(name, dtype), {"points": [point | extra], "skipped": []}, None, 1.0)


OURS = outcome("kvjax", [5, 6, 7], likeliest=[[[t, 1, 2], [-0.1, -0.3, -3.0]] for t in (5, 6, 7)])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5, 6, 7], "equal, 3 tokens"),
        ([5, 1, 9], "near tie at token 1 (0.20 nats)"),
        ([5, 2, 9], "DIFFERS at token 1 (2.90 nats)"),
        ([9, 6, 7], "DIFFERS at token 0: not among the 3 likeliest"),
    ],
)
def test_a_peer_of_another_model_is_flagged(tokens, said):
    assert agreement(OURS, outcome("openvino", tokens), 512) == said


def test_a_peer_that_did_not_run_stays_in_the_tables():
    missing = Outcome(Engine("vllm", "float32"), None, "no AVX2", 0.0)
    rows = comparison_rows(OURS, [outcome("transformers", [5, 6, 7]), missing], [(512, 1)])
    assert [row.metric for row in rows] == ["decode speed", "prefill speed"] * 2
    assert rows[0].ratio == 1.0
    assert rows[0].met is False
    assert rows[2].baseline == "vLLM CPU float32 (not measured: no AVX2)"
    assert rows[2].met is None
    steps, prefill, tokens, why = measurements([OURS, missing], [(512, 1)])
    assert steps[1:] == (
        ["context", "batch", "kvjax float32", "vLLM CPU float32"],
        [["512", "1", "100", "-"]],
    )
    assert prefill[2] == [["512", "400", "-"]]
    assert tokens[2] == [["512", "equal, 3 tokens", "not compared"]]
    assert why[2] == [["vLLM CPU float32", "512", "1", "no AVX2"]]


def test_the_fit_finds_intercept_and_bandwidth():
    line = fit([(mb, 20.0 + 0.1 * mb) for mb in (10.0, 100.0, 400.0)])
    assert line.intercept_ms == pytest.approx(20.0)
    assert line.gb_per_s == pytest.approx(10.0)
    assert line.r_squared == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least 2 points"):
        fit([(1.0, 2.0)])


def test_engines_run_in_the_dtype_that_is_fast_here():
    assert [e.label for e in choose(["kvjax", "vllm"], bf16_is_fast=False)] == [
        *("kvjax float32", "kvjax bf16", "vLLM CPU float32")
    ]
    assert choose(["vllm"], bf16_is_fast=True) == [Engine("vllm", "bfloat16")]
    assert choose(["vllm:float32"], bf16_is_fast=True) == [Engine("vllm", "float32")]
    with pytest.raises(ValueError, match="must be one of"):
        choose(["tgi"], bf16_is_fast=False)
