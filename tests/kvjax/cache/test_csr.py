"""Block tables in compressed rows, there and back, and every rule they must obey."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import check_csr, from_csr, to_csr
from kvjax.errors import KvjaxError

SIZES = {"page_size": 16, "num_pages": 50, "max_pages": 4}
GOOD = {"kv_indptr": [0, 2, 2, 3], "kv_indices": [7, 0, 49], "kv_last_page_len": [16, 0, 1]}
expand = jax.jit(from_csr, static_argnames=("page_size", "num_pages", "max_pages"))
compress = jax.jit(to_csr, static_argnums=(2, 3))


def csr(**changes):
    arrays = {**GOOD, **changes}
    return {name: jnp.asarray(np.asarray(value, np.int32)) for name, value in arrays.items()}


def test_a_small_case_by_hand():
    tables, lengths = expand(*csr().values(), **SIZES)
    none = SIZES["num_pages"]
    assert tables.tolist() == [[7, 0, none, none], [none] * 4, [49, none, none, none]]
    assert lengths.tolist() == [32, 0, 1]
    indptr, indices, last = compress(tables, lengths, 16, none)
    assert indptr.tolist() == GOOD["kv_indptr"]
    assert indices.tolist() == GOOD["kv_indices"] + [none] * 9
    assert last.tolist() == GOOD["kv_last_page_len"]
    check_csr(indptr, indices, last, **SIZES)


def test_round_trips_over_every_length_class():
    """Full last pages, empty sequences first, last and in a row, and pages only reserved, which
    the compressed form leaves out."""
    rng = np.random.default_rng(1)
    classes = (0, 1, 15, 16, 17, 32, 33, 64)
    for _ in range(20):
        lengths = rng.choice(classes, 6).astype(np.int32)
        reserved = np.minimum(-(-lengths // 16) + rng.integers(0, 2, 6), 4)
        ids = rng.permutation(50)[: reserved.sum()]
        tables = np.full((6, 4), 50, np.int32)
        tables[np.arange(4)[None, :] < reserved[:, None]] = ids
        rows = compress(jnp.asarray(tables), jnp.asarray(lengths), 16, 50)
        check_csr(*rows, **SIZES)
        held = np.arange(4)[None, :] < -(-lengths // 16)[:, None]
        np.testing.assert_array_equal(rows[1][: rows[0][-1]], tables[held])
        back, back_lengths = expand(*rows, **SIZES)
        np.testing.assert_array_equal(back, np.where(held, tables, 50))
        np.testing.assert_array_equal(back_lengths, lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_indptr": [1, 2, 2, 3]}, r"kv_indptr\[0\] is 1: must be 0"),
        ({"kv_indptr": [0, 2, 1, 3]}, "kv_indptr gives sequence 1 -1 pages"),
        ({"kv_indptr": [0, 5, 5, 6]}, "sequence 0 5 pages: must be 0 to max_pages=4"),
        ({"kv_indptr": [0, 2, 2]}, "kv_indptr has 3 entries for 3 sequences"),
        ({"kv_indptr": [0, 2, 2, 4]}, "kv_indices has 3 entries and kv_indptr ends at 4"),
        ({"kv_last_page_len": [0, 0, 1]}, r"kv_last_page_len\[0\] is 0: must be 1 to 16"),
        ({"kv_last_page_len": [17, 0, 1]}, r"kv_last_page_len\[0\] is 17: must be 1 to 16"),
        ({"kv_last_page_len": [16, 1, 1]}, r"kv_last_page_len\[1\] is 1: must be 0 to 0"),
        ({"kv_last_page_len": [16, 0, -1]}, r"kv_last_page_len\[2\] is -1"),
        ({"kv_indices": [7, 50, 49]}, r"kv_indices\[1\] is 50: must be a page id, 0 to 49"),
        ({"kv_indices": [7, 0, -1]}, r"kv_indices\[2\] is -1: must be a page id"),
    ],
)
def test_a_broken_rule_is_named(changes, message):
    """A last page said to hold more than a page, or an index past the pool, would be read out of
    bounds without a word."""
    with pytest.raises(KvjaxError, match=message):
        check_csr(**csr(**changes), **SIZES)


@pytest.mark.parametrize("name", GOOD)
def test_other_integers_are_refused(name):
    """A table of another integer type, read as int32, would be nonsense that looks like pages."""
    for dtype in (np.int64, np.uint16):
        arrays = {**csr(), name: np.asarray(GOOD[name], dtype)}
        with pytest.raises(KvjaxError, match=f"{name} is {np.dtype(dtype)} of 1 dimensions"):
            check_csr(**arrays, **SIZES)
    with pytest.raises(KvjaxError, match=f"{name} is int32 of 2 dimensions"):
        check_csr(**{**csr(), name: csr()[name][None]}, **SIZES)


def test_entries_past_the_end_may_hold_anything():
    check_csr(**csr(kv_indices=[7, 0, 49, -5, 1000]), **SIZES)
