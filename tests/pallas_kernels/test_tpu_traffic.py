"""The counted HBM bytes: against the copies of an interpreted kernel, and against the least."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks import kernel_traffic
from kvjax.pallas_kernels.mosaic import stream
from kvjax.pallas_kernels.mosaic.traffic import Heads, decode_traffic, ragged_traffic
from kvjax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from kvjax.pallas_kernels.ragged_paged_attention.tpu import ragged_paged_attention_tpu

LENGTHS = [0, 1, 700, 16, 17, 320]
QUERIES = [0, 1, 70, 1, 5, 20]
OPTIONS = ({}, {"window": 40}, {"window": 40, "sink_tokens": 20})


@pytest.fixture
def copied(monkeypatch):
    """The page ids that kernels copy, in order, keys and values each."""
    pages = []
    copies = stream.PageStream._copies

    class Counted:
        def __init__(self, copy, page_id):
            self.copy, self.page_id = copy, page_id

        def start(self):
            jax.debug.callback(lambda page: pages.append(int(page)), self.page_id)
            self.copy.start()

        def wait(self):
            self.copy.wait()

    def counted(self, page_id, slot, page):
        return tuple(Counted(copy, page_id) for copy in copies(self, page_id, slot, page))

    monkeypatch.setattr(stream.PageStream, "_copies", counted)
    return pages


def call(function, heads, rows, table, *ragged, **options):
    rng = np.random.default_rng(0)
    shape = (int(table.max()) + 1, heads.kv_heads, heads.page_size, heads.head_dim)
    pool = jnp.asarray(rng.normal(size=shape), jnp.float32)
    q = jnp.asarray(rng.normal(size=(rows, heads.query_heads, heads.head_dim)), jnp.float32)
    run = functools.partial(
        function,
        scale=1 / math.sqrt(heads.head_dim),
        window=heads.window,
        sink_tokens=heads.sink_tokens,
        sink_logits=None,
        soft_cap=None,
        page_stats=False,
        interpret=pltpu.InterpretParams(),
        **options,
    )
    quick = {"xla_backend_optimization_level": 0}
    result = jax.jit(run, compiler_options=quick)(q, pool, pool, table, *ragged)
    jax.block_until_ready(result)
    jax.effects_barrier()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
def test_the_count_is_what_the_kernel_copies(copied, decode, options):
    heads = Heads(query_heads=2, kv_heads=1, head_dim=128, page_size=16, itemsize=4, **options)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    width = 48
    table = jnp.arange(len(LENGTHS) * width, dtype=jnp.int32).reshape(-1, width)
    if decode:
        traffic = decode_traffic(lengths, width, heads)
        call(paged_attention_tpu, heads, len(LENGTHS), table, lengths, query_positions=lengths - 1)
    else:
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(QUERIES)]), jnp.int32)
        traffic = ragged_traffic(lengths, starts, width, heads)
        call(ragged_paged_attention_tpu, heads, sum(QUERIES), table, lengths, starts)
    page_bytes = heads.page_size * heads.slot_bytes // 2
    assert len(copied) * page_bytes == traffic.kv_read
    keys, values = copied[::2], copied[1::2]
    assert sorted(keys) == sorted(values)
    assert len(set(keys)) == len(keys)  # each page once
    # Never a page without a visible slot: what is read but not needed is at most a page's rest
    # before and after each run of visible slots.
    waste = traffic.kv_read - traffic.kv_needed
    assert 0 <= waste < len(LENGTHS) * 3 * heads.page_size * heads.slot_bytes


def test_decode_reads_no_more_than_it_must_from_2k_tokens_on():
    for call_ in kernel_traffic.workloads(quick=True):
        if call_.heads.head_dim >= 128 and "one call" not in call_.name:
            rows = kernel_traffic.rows_of(call_, kernel_traffic.count(call_))
            assert all(row.met for row in rows), call_


def test_needed_bytes_by_hand():
    heads = Heads(query_heads=2, kv_heads=1, head_dim=128, page_size=16, itemsize=2, window=10)
    slot = 2 * 128 * 2
    traffic = decode_traffic(jnp.asarray([33], jnp.int32), 4, heads)
    # Position 32 sees slots 23 .. 32: in pages 1 and 2.
    assert traffic.kv_needed == 10 * slot
    assert traffic.kv_read == 2 * 16 * slot
    assert traffic.flops == 10 * 2 * 2 * 128 * 2
    sinks = decode_traffic(jnp.asarray([33], jnp.int32), 4, heads._replace(sink_tokens=3))
    assert sinks.kv_needed == 13 * slot
    assert sinks.kv_read == 3 * 16 * slot
    narrow = decode_traffic(jnp.asarray([33], jnp.int32), 4, heads._replace(head_dim=64))
    assert narrow.padding == narrow.kv_read
