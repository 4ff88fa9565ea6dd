"""The Mosaic kernels in Pallas' TPU interpreter: the shared body, races, and many small blocks."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.mosaic import stream, tiles, work
from kvjax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from kvjax.pallas_kernels.ragged_paged_attention.tpu import ragged_paged_attention_tpu
from tests.pallas_kernels.conformance import (
    DECODE,
    RAGGED,
    SHAPES,
    TOLERANCE,
    Case,
    assert_close,
    batch_and_answer,
    check,
)
from tests.pallas_kernels.races import WATCHED, assert_no_race

KERNELS = {
    "paged_attention": paged_attention_tpu,
    "ragged_paged_attention": ragged_paged_attention_tpu,
}
RACING = (
    ("paged_attention", Case(long=True, kv_heads=1, group=2, window=150, sink_tokens=40)),
    ("paged_attention", Case(long=True, kv_heads=2, group=1, dtype="bfloat16", page_stats=True)),
    ("ragged_paged_attention", Case(long=True, kv_heads=1, group=1, page_size=8)),
    ("ragged_paged_attention", Case(kv_heads=1, group=3, page_size=8, page_stats=True)),
)


# The two operations are one kernel, and interpreting it costs seconds of compilation: every case
# runs in one of them, and what concerns the cutting into blocks in both.
ONLY_RAGGED = [case for case in RAGGED[len(SHAPES) :] if not case.long and not case.sink_tokens]
ONLY_DECODE = SHAPES[4:6] + SHAPES[7:]


@pytest.mark.parametrize(
    "case", [case for case in DECODE if case not in ONLY_RAGGED], ids=lambda case: case.name
)
def test_decode_equals_the_definition(case):
    check("paged_attention", "tpu", case)


@pytest.mark.parametrize(
    "case", [case for case in RAGGED if case not in ONLY_DECODE], ids=lambda case: case.name
)
def test_ragged_equals_the_definition(case):
    check("ragged_paged_attention", "tpu", case)


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks and chunks so small that a short batch has many: every hand-over happens."""
    monkeypatch.setattr(tiles, "MAX_KV_TOKENS", 128)
    monkeypatch.setattr(tiles, "CHUNK_ROWS", 32)
    monkeypatch.setattr(tiles, "QUERY_BYTES", 128 * 1024)
    monkeypatch.setattr(tiles, "DECODE_ROWS", 16)


def run(op, case, interpret=WATCHED):
    """Run a kernel afresh (the shared body's are cached) and compare it with the definition."""
    arrays, options, wanted = batch_and_answer(op, case)
    options = dict(options)
    options["scale"] = options["scale"] or 1 / math.sqrt(arrays["q"].shape[2])
    if "query_positions" in options and options["query_positions"] is None:
        options["query_positions"] = arrays["lengths"] - 1
    traced = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in options.items() if name not in traced}
    function = functools.partial(KERNELS[op], interpret=interpret, **static)
    quick = {"xla_backend_optimization_level": 0}
    result = jax.jit(function, compiler_options=quick)(**arrays, **traced)
    jax.block_until_ready(result)
    assert_close(result, wanted, TOLERANCE[case.dtype], case.page_stats)


@pytest.mark.parametrize(("op", "case"), RACING, ids=lambda value: getattr(value, "name", value))
def test_no_race_between_copies_and_computation(op, case, small_tiles, capfd):
    assert_no_race(capfd, functools.partial(run, op, case))


def test_a_race_would_be_noticed(small_tiles, capfd, monkeypatch):
    def copies(self, page_id, slot, page):
        # Both halves of the double buffer are the first.
        return [
            pltpu.make_async_copy(
                pool.pages[0].at[page_id],
                buffer.pages[0].at[0, :, page],
                self.semaphores.at[slot, which],
            )
            for which, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True))
        ]

    def run_whatever_comes_out():
        with contextlib.suppress(AssertionError):
            run(*RACING[1])

    monkeypatch.setattr(stream.PageStream, "_copies", copies)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED"):
        assert_no_race(capfd, run_whatever_comes_out)


@pytest.mark.parametrize("op", KERNELS)
def test_a_group_wider_than_a_tile(op):
    run(op, Case(kv_heads=1, group=20, page_stats=True), pltpu.InterpretParams())


@pytest.mark.parametrize("page_stats", [False, True])
@pytest.mark.parametrize("op", KERNELS)
def test_a_batch_whose_tables_exceed_scalar_memory_is_split(op, page_stats, monkeypatch):
    case = Case(kv_heads=1, group=2, sink_logits=True, page_stats=page_stats)
    arrays, _, _ = batch_and_answer(op, case)
    batch, width = arrays["block_tables"].shape
    per_row = width + len(work.Work._fields) + 1
    monkeypatch.setattr(work, "SCALAR_WORDS", 3 * per_row + len(work.Work._fields) + 1)
    assert batch % 3  # the last part is smaller
    run(op, case, pltpu.InterpretParams())


def test_a_table_that_no_scalar_memory_holds_is_refused():
    width = work.SCALAR_WORDS + 1
    q = jnp.zeros((1, 1, 64), jnp.float32)
    pages = jnp.zeros((1, 1, 128, 64), jnp.float32)
    lengths = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"block_tables has {width} entries a row"):
        paged_attention_tpu(
            q,
            pages,
            pages,
            jnp.zeros((1, width), jnp.int32),
            lengths,
            scale=1.0,
            window=None,
            sink_tokens=0,
            sink_logits=None,
            soft_cap=None,
            query_positions=lengths,
            page_stats=False,
        )


@pytest.mark.parametrize("group", [1, 3, 5, 16, 20])
@pytest.mark.parametrize("decode", [True, False])
def test_tiles_divide(group, decode):
    for queries in (1, 7, 512, 3000):
        chosen = tiles.choose_tiles(
            num_queries=queries,
            group=group,
            kv_heads=8,
            page_size=24,
            head_dim=128,
            v_head_dim=64,
            q_itemsize=2,
            kv_itemsize=2,
            out_itemsize=4,
            decode=decode,
        )
        assert chosen.group >= group
        assert chosen.window_rows % chosen.group == 0
        assert chosen.chunk_rows % chosen.window_rows == 0
        assert chosen.rows % chosen.chunk_rows == 0
        assert chosen.rows == chosen.tokens * chosen.group
        assert np.log2(chosen.vmem_bytes) < 26  # 64 MiB, the smallest VMEM of v5e, v5p and v6e
