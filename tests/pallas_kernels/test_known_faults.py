"""Faults that paged caches are known for; each test's docstring says the fault and the rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import check_ragged, check_tables, paged_attention
from kvjax.pallas_kernels import ragged_paged_attention as ragged
from tests.pallas_kernels.conformance import Case, assert_close, build, expected, pool, run

IMPLEMENTATIONS = ("reference", "xla")
PLAIN = {
    "scale": None,
    "window": None,
    "sink_tokens": 0,
    "sink_logits": None,
    "soft_cap": None,
    "page_stats": False,
}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def decode_batch(tokens, lengths, page_size, seed=0):
    """Sequences whose b-th holds the first lengths[b] of `tokens` [L, 2 * Hkv, D] (k, then v)."""
    rng = np.random.default_rng(seed)
    heads, head_dim = tokens.shape[1] // 2, tokens.shape[2]
    case = Case(page_size=page_size, head_dim=head_dim, kv_heads=heads)
    width = -(-max(lengths) // page_size) + 1
    k_pages, v_pages, block_tables = pool(rng, case, lengths, width)
    for row, length in enumerate(lengths):
        for slot in range(length):
            page = block_tables[row, slot // page_size]
            k_pages[page, :, slot % page_size] = tokens[slot, :heads]
            v_pages[page, :, slot % page_size] = tokens[slot, heads:]
    return {
        "k_pages": jnp.asarray(k_pages, jnp.float32),
        "v_pages": jnp.asarray(v_pages, jnp.float32),
        "block_tables": jnp.asarray(block_tables),
    }


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@every_implementation
def test_page_size_changes_nothing(implementation):
    """A page id used where a token slot was meant shows as soon as pages differ from 16 tokens:
    the same tokens give the same attention for every page size."""
    tokens, q = np.asarray(normal(1, 130, 4, 64)), normal(2, 4, 4, 64)
    lengths = [130, 64, 1, 17]
    results = [
        run(
            "paged_attention",
            implementation,
            {"q": q, "lengths": jnp.asarray(lengths, jnp.int32)}
            | decode_batch(tokens, lengths, page_size),
            PLAIN | {"query_positions": None},
        )
        for page_size in (8, 64)
    ]
    np.testing.assert_allclose(results[0].out, results[1].out, 1e-5, 1e-5)
    np.testing.assert_allclose(results[0].lse, results[1].lse, 1e-5, 1e-5)


@every_implementation
@pytest.mark.parametrize("length", [16, 48])
def test_a_prompt_of_whole_pages_ends_where_its_last_query_stands(implementation, length):
    """A length that is a multiple of the page size made two places each subtract one: the last
    query of the prompt sees all of it, whether it comes as a decode or as the end of a prefill."""
    pages = decode_batch(np.asarray(normal(1, length, 4, 64)), [length], 16)
    q = normal(2, length, 4, 64)
    end = jnp.asarray([length], jnp.int32)
    whole = run(
        "ragged_paged_attention",
        implementation,
        {"q": q, "kv_lengths": end, "cu_q_lengths": jnp.asarray([0, length], jnp.int32)} | pages,
        PLAIN,
    )
    last = run(
        "paged_attention",
        implementation,
        {"q": q[-1:], "lengths": end} | pages,
        PLAIN | {"query_positions": None},
    )
    np.testing.assert_allclose(whole.out[-1:], last.out, 1e-5, 1e-5)
    np.testing.assert_allclose(whole.lse[-1:], last.lse, 1e-5, 1e-5)


@every_implementation
@pytest.mark.parametrize("unused", [0, 4, 5, 2**31 - 1])
def test_unused_table_entries_are_never_read(implementation, unused):
    """Unallocated entries were read as page ids, and page 0 served as a dummy whose content leaked:
    whatever an unused entry says, and whatever stands in page 0, the result is the same."""
    rng = np.random.default_rng(0)
    k_pages, v_pages = (np.full((5, 2, 16, 64), np.nan) for _ in range(2))
    k_pages[[3, 1]], v_pages[[3, 1]] = rng.normal(size=(2, 2, 2, 16, 64))
    k_pages[0], v_pages[0] = np.inf, -np.inf
    block_tables = np.full((2, 4), unused)
    block_tables[0, :2] = [3, 1]
    arrays = {
        "q": normal(1, 2, 4, 64),
        "k_pages": jnp.asarray(k_pages, jnp.float32),
        "v_pages": jnp.asarray(v_pages, jnp.float32),
        "block_tables": jnp.asarray(block_tables, jnp.int32),
        "lengths": jnp.asarray([20, 0], jnp.int32),
    }
    options = PLAIN | {"query_positions": None, "page_stats": True}
    result = run("paged_attention", implementation, arrays, options)
    assert_close(result, expected("paged_attention", arrays, options), 1e-5, page_stats=True)


def test_a_table_of_another_integer_type_is_refused():
    """A uint16 page table was read as uint32: tables are int32 or refused."""
    arrays, options = build("paged_attention", Case())
    arrays["block_tables"] = arrays["block_tables"].astype(jnp.uint16)
    with pytest.raises(ValueError, match="block_tables is uint16; it must be int32"):
        paged_attention(**arrays, **options)


def test_a_negative_page_id_is_found_before_it_wraps():
    """-1 for "no page" wraps around to the pool's last page in JAX: it is an error that says what
    to write instead."""
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\] is -1.*write num_pages \(7\)"):
        check_tables(np.asarray([[3, -1]], np.int32), np.asarray([5], np.int32), 7, 8)


@every_implementation
@pytest.mark.parametrize("lengths", [[0, 1, 16, 0], [0, 0]])
def test_a_sequence_of_no_tokens_gives_zero_not_nan(implementation, lengths):
    """Length 0 in a padded batch became 0/0: its output is exactly 0, its log-sum-exp -inf, and
    nothing in the batch is NaN."""
    arrays = {
        "q": normal(1, len(lengths), 4, 64),
        "lengths": jnp.asarray(lengths, jnp.int32),
    } | decode_batch(np.asarray(normal(2, 16, 4, 64)), lengths, 16)
    options = PLAIN | {"query_positions": None, "page_stats": True}
    result = run("paged_attention", implementation, arrays, options)
    empty = np.asarray(lengths) == 0
    assert np.isfinite(result.out).all()
    assert not np.asarray(result.out)[empty].any()
    assert np.isneginf(np.asarray(result.lse)[empty]).all()
    assert np.isfinite(np.asarray(result.lse)[~empty]).all()
    assert np.isneginf(np.asarray(result.page_max)[empty]).all()
    assert not np.asarray(result.page_sum)[empty].any()


@pytest.mark.parametrize(
    ("kv_lengths", "cu_q_lengths", "message"),
    [
        ([4, 4], [1, 2, 3], r"cu_q_lengths\[0\] is 1; it must be 0"),
        ([4, 4], [0, 3, 2], "falls from 3 to 2 at entry 2"),
        ([4, 1], [0, 1, 3], "sequence 1 has 2 queries"),
        ([4, 4], [0, 1, 9], "sequence 1 has 8 queries"),
        ([9, 9], [0, 1, 9], "ends at 9 and q has 8 rows"),
    ],
)
def test_lengths_that_point_outside_are_found(kv_lengths, cu_q_lengths, message):
    """A last page said to hold more than a page, or starts that fall, were accepted and read out
    of bounds: each broken invariant is an error."""
    with pytest.raises(ValueError, match=message):
        check_ragged(np.asarray(kv_lengths, np.int32), np.asarray(cu_q_lengths, np.int32), 8)


@every_implementation
def test_padded_and_true_lengths_are_not_mixed_up(implementation):
    """Starts summed over padded lengths met starts summed over true ones in a mixed batch: prefills
    and decodes of 1, 17, 16, 0 and 33 tokens, with padding behind them, equal each one alone."""
    lengths = np.asarray([1, 17, 16, 0, 33])
    queries = np.asarray([1, 17, 1, 0, 20])
    starts = np.concatenate([[0], np.cumsum(queries)])
    tokens = np.asarray(normal(3, 33, 4, 64))
    pages = decode_batch(tokens, lengths, 16)
    q = normal(4, starts[-1] + 9, 4, 64).at[starts[-1] :].set(jnp.nan)
    arrays = {
        "q": q,
        "kv_lengths": jnp.asarray(lengths, jnp.int32),
        "cu_q_lengths": jnp.asarray(starts, jnp.int32),
    } | pages
    options = PLAIN | {"page_stats": True}
    result = run("ragged_paged_attention", implementation, arrays, options)
    wanted = expected("ragged_paged_attention", arrays, options)
    assert_close(result, wanted, 1e-5, page_stats=True)


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_a_pool_whose_offsets_overflow_int32_is_refused(name):
    """Slot times stride overflowed int32 in large pools: a pool of 2**31 elements is refused, and
    the message says how many pages fit."""

    def pages(count):
        return jax.ShapeDtypeStruct((count, 8, 16, 128), jnp.bfloat16)

    fits = 2**31 // (8 * 16 * 128) - 1
    arrays = {
        "q": jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16),
        "k_pages": pages(fits),
        "v_pages": pages(fits),
        "block_tables": jax.ShapeDtypeStruct((1, 4), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    narrow = "k_pages" if name == "v_pages" else "v_pages"
    too_many = {
        name: pages(fits + 1),
        narrow: jax.ShapeDtypeStruct((fits + 1, 8, 16, 64), jnp.bfloat16),
    }
    if narrow == "k_pages":
        too_many["q"] = jax.ShapeDtypeStruct((1, 8, 64), jnp.bfloat16)
    function = functools.partial(paged_attention, implementation="reference")
    assert jax.eval_shape(function, **arrays).out.shape == (1, 8, 128)
    with pytest.raises(ValueError, match=f"{name} has {fits + 1} pages.*at most {fits} pages"):
        jax.eval_shape(function, **(arrays | too_many))


@every_implementation
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention"])
def test_keys_and_values_may_differ_in_width(implementation, op):
    """head_dim of keys was taken for that of values: 24 and 16 are independent."""
    arrays, options = build(op, Case(head_dim=24, v_head_dim=16, page_stats=True))
    result = run(op, implementation, arrays, options)
    assert result.out.shape[-1] == 16
    assert_close(result, expected(op, arrays, options), 1e-5, page_stats=True)


@every_implementation
def test_pages_are_found_through_the_table_in_prefill_too(implementation):
    """A prefill that continues a cached prefix read the pool as if it were contiguous: the result
    does not depend on where the pages lie."""
    tokens, q = np.asarray(normal(5, 70, 4, 64)), normal(6, 30, 4, 64)
    results = [
        run(
            "ragged_paged_attention",
            implementation,
            {
                "q": q,
                "kv_lengths": jnp.asarray([70], jnp.int32),
                "cu_q_lengths": jnp.asarray([0, 30], jnp.int32),
            }
            | decode_batch(tokens, [70], 8, seed),
            PLAIN,
        )
        for seed in (0, 1, 2)
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].out, other.out)


@pytest.mark.parametrize(
    ("implementation", "window"),
    [("reference", None), ("reference", 9), ("xla", None), ("xla", 9), ("tpu", 9)],
)
def test_chunk_size_changes_nothing(implementation, window):
    """Scores computed in chunks lost the chunk's offset, so later chunks saw too few keys: a prompt
    in chunks of 1, 7, 16 or all of it gives the same outputs, also under a window."""
    length = 45
    pages = decode_batch(np.asarray(normal(7, length, 4, 64)), [length], 16)
    q = normal(8, length, 4, 64)
    # Each chunk of each chunking is a sequence of its own that shares the prompt's pages.
    chunks = (1, 7, 16, length)
    ends = [np.minimum(np.arange(chunk, length + chunk, chunk), length) for chunk in chunks]
    starts = np.concatenate([turn * length + end for turn, end in enumerate(ends)])
    kv_lengths = np.concatenate(ends)
    arrays = {
        "q": jnp.tile(q, (len(chunks), 1, 1)),
        "kv_lengths": jnp.asarray(kv_lengths, jnp.int32),
        "cu_q_lengths": jnp.asarray([0, *starts], jnp.int32),
        "k_pages": pages["k_pages"],
        "v_pages": pages["v_pages"],
        "block_tables": jnp.tile(pages["block_tables"], (len(kv_lengths), 1)),
    }
    options = PLAIN | {"window": window}
    out = run("ragged_paged_attention", implementation, arrays, options).out
    for other in np.split(np.asarray(out), len(chunks))[1:]:
        np.testing.assert_allclose(out[:length], other, 1e-5, 1e-5)


@every_implementation
def test_a_chunk_behind_a_longer_cache_is_masked_from_its_own_place(implementation):
    """The causal mask of 3 queries over 10 keys started at key 0: query i stands at 10 - 3 + i and
    does not see what comes after it."""
    tokens, q = np.asarray(normal(9, 10, 4, 64)), normal(10, 3, 4, 64)

    def attend(tokens):
        arrays = {
            "q": q,
            "kv_lengths": jnp.asarray([10], jnp.int32),
            "cu_q_lengths": jnp.asarray([0, 3], jnp.int32),
        } | decode_batch(tokens, [10], 8)
        return np.asarray(run("ragged_paged_attention", implementation, arrays, PLAIN).out)

    before = attend(tokens)
    changed = tokens.copy()
    changed[8] += 1
    after = attend(changed)
    np.testing.assert_array_equal(before[0], after[0])
    assert (before[1:] != after[1:]).all()


@every_implementation
def test_new_lengths_and_tables_do_not_compile_again(implementation):
    """Values that crept into shapes or static arguments compiled a program each step: tables,
    lengths and starts are data."""
    function = jax.jit(functools.partial(ragged, implementation=implementation))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(5, 30, 3)
        pages = decode_batch(np.asarray(normal(seed, 40, 4, 64)), [*lengths], 16, seed)
        room = 12 - pages["k_pages"].shape[0]
        function(
            normal(seed, 8, 4, 64),
            *(
                jnp.pad(pages[name], ((0, room), (0, 0), (0, 0), (0, 0)))
                for name in ("k_pages", "v_pages")
            ),
            jnp.pad(pages["block_tables"], ((0, 0), (0, 3)))[:, :3],
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray([0, *np.sort(rng.integers(0, 5, 3))], jnp.int32),
        )
    assert function._cache_size() == 1
