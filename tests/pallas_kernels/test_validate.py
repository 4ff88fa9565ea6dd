import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import check_ragged, check_tables
from tests.pallas_kernels.conformance import API

OPERATIONS = ("paged_attention", "ragged_paged_attention")
both = pytest.mark.parametrize("op", OPERATIONS)


def good(op):
    """Arguments that pass: B = 2, T = 2, Hq = 4, Hkv = 2, P = 16, D = 64, N = 3, M = 2."""
    arguments = {
        "q": jnp.zeros((2, 4, 64)),
        "k_pages": jnp.zeros((3, 2, 16, 64)),
        "v_pages": jnp.zeros((3, 2, 16, 64)),
        "block_tables": jnp.zeros((2, 2), jnp.int32),
    }
    if op == "paged_attention":
        return arguments | {"lengths": jnp.ones(2, jnp.int32)}
    return arguments | {
        "kv_lengths": jnp.ones(2, jnp.int32),
        "cu_q_lengths": jnp.asarray([0, 1, 2], jnp.int32),
    }


def refuses(op, message, **changed):
    with pytest.raises(ValueError, match=message):
        API[op](**(good(op) | changed), implementation="reference")


@both
def test_good_arguments_pass(op):
    assert API[op](**good(op), implementation="reference").out.shape == (2, 4, 64)


@both
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 64), r"q has shape \(2, 64\); it must be \[T, Hq, D\]"),
        ("q", (2, 0, 64), "q has shape .*every axis needs at least one entry"),
        ("q", (2, 3, 64), "q has 3 heads and k_pages has 2 KV heads.*multiple of the KV heads"),
        ("q", (2, 4, 80), "q has head_dim 80 and k_pages has 64"),
        ("q", (2, 4, 0), "every axis needs at least one entry"),
        ("k_pages", (3, 2, 64), r"k_pages has shape .*it must be \[N, Hkv, P, D\]"),
        ("k_pages", (0, 2, 16, 64), "k_pages has shape .*every axis needs at least one entry"),
        ("k_pages", (4, 2, 16, 64), "they may differ only in the last axis"),
        ("k_pages", (3, 1, 16, 64), "they may differ only in the last axis"),
        ("v_pages", (3, 2, 32, 64), "v_pages has shape .*they may differ only in the last axis"),
        ("v_pages", (3, 2, 16), r"v_pages has shape .*it must be \[N, Hkv, P, Dv\]"),
    ],
)
def test_shapes(op, name, shape, message):
    refuses(op, message, **{name: jnp.zeros(shape)})


@both
@pytest.mark.parametrize("page_size", [0, 1, 7, 129, 256])
def test_page_size(op, page_size):
    pages = jnp.zeros((3, 2, page_size, 64))
    message = rf"page_size \(axis 2 of k_pages\) is {page_size}; it must be from 8 to 128"
    refuses(op, message, k_pages=pages, v_pages=pages)


@both
@pytest.mark.parametrize("page_size", [8, 12, 128])
def test_page_sizes_in_range_pass(op, page_size):
    pages = jnp.zeros((3, 2, page_size, 64))
    API[op](**(good(op) | {"k_pages": pages, "v_pages": pages}), implementation="reference")


@both
@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages"])
@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_float_dtypes(op, name, dtype):
    array = np.zeros(good(op)[name].shape, dtype)
    refuses(op, f"{name} is {dtype.__name__}; it must be one of float32, bfloat16", **{name: array})


@both
def test_keys_and_values_have_one_dtype(op):
    values = jnp.zeros((3, 2, 16, 64), jnp.bfloat16)
    refuses(op, "v_pages is bfloat16 and k_pages is float32", v_pages=values)


@both
@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.float32])
def test_integer_dtypes(op, dtype):
    for name, array in good(op).items():
        if array.dtype == jnp.int32:
            message = f"{name} is {dtype.__name__}; it must be int32"
            refuses(op, message, **{name: np.asarray(array, dtype)})


@both
def test_lists_are_not_arrays(op):
    refuses(op, "block_tables is a list; it must be an array", block_tables=[[0, 1], [2, 0]])


@pytest.mark.parametrize(
    ("op", "name", "length", "message"),
    [
        ("paged_attention", "lengths", 3, r"block_tables has 2 rows, so it must be \(2,\)"),
        ("paged_attention", "query_positions", 1, r"query_positions has shape \(1,\)"),
        ("ragged_paged_attention", "kv_lengths", 3, r"kv_lengths has shape \(3,\)"),
        ("ragged_paged_attention", "cu_q_lengths", 2, r"so it must be \(3,\)"),
    ],
)
def test_lengths_per_sequence(op, name, length, message):
    refuses(op, message, **{name: jnp.zeros(length, jnp.int32)})


def test_decode_takes_one_query_a_sequence():
    refuses("paged_attention", "q has 3 rows and block_tables has 2", q=jnp.zeros((3, 4, 64)))


@both
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", 0.0, "scale is 0.0; it must be finite and above 0"),
        ("scale", float("nan"), "scale is nan"),
        ("scale", "1", "scale is '1'; it must be a Python number"),
        ("window", 0, "window is 0; it must be an integer, at least 1 .*; pass None for no window"),
        ("window", -3, "window is -3"),
        ("window", 2**31, r"window is 2147483648; .*below 2\*\*31"),
        ("window", 4.0, "window is 4.0; it must be an integer"),
        ("window", True, "window is True"),
        ("sink_tokens", -1, "sink_tokens is -1; it must be an integer, at least 0"),
        ("soft_cap", 0.0, "soft_cap is 0.0; it must be finite and above 0"),
        ("soft_cap", float("inf"), "soft_cap is inf"),
        ("page_stats", 1, "page_stats is 1; it must be True or False"),
        ("sink_logits", jnp.zeros(2), r"sink_logits has shape \(2,\); q has 4 heads"),
        ("sink_logits", jnp.zeros((4, 1)), r"sink_logits has shape \(4, 1\); it must be \[Hq\]"),
        ("sink_logits", jnp.zeros(4, jnp.int32), "sink_logits is int32"),
    ],
)
def test_options(op, name, value, message):
    refuses(op, message, **{name: value})


@both
def test_sink_tokens_without_a_window_have_no_effect(op):
    arguments = good(op) | {"q": jnp.ones((2, 4, 64)), "v_pages": jnp.ones((3, 2, 16, 64))}
    plain = API[op](**arguments, implementation="reference")
    sinks = API[op](**arguments, sink_tokens=3, implementation="reference")
    np.testing.assert_array_equal(plain.out, sinks.out)


@both
def test_errors_come_before_tracing(op):
    """A traced window would fail deep inside an implementation; here it fails by name."""

    def attend(window):
        return API[op](**good(op), window=window)

    with pytest.raises(ValueError, match=r"window is .*it must be an integer"):
        jax.jit(attend)(3)


@pytest.mark.parametrize(
    ("tables", "lengths", "message"),
    [
        ([[0, 1]], [-1], r"lengths\[0\] is -1; it must be at least 0"),
        ([[0, 1]], [17], r"lengths\[0\] is 17; .*at most 16: widen block_tables"),
        ([[0, 1], [2, -1]], [9, 3], r"block_tables\[1, 1\] is -1"),
        ([[0, 3]], [9], r"block_tables\[0, 1\] is 3; .*9 tokens need a page there, from 0 to 2"),
        ([[3, 3]], [1], r"block_tables\[0, 0\] is 3"),
        ([[0, 1]], [1, 1], r"lengths has shape \(2,\); it must be \(1,\)"),
        ([0, 1], [1], r"block_tables has shape \(2,\); it must have 2 axes"),
    ],
)
def test_check_tables(tables, lengths, message):
    with pytest.raises(ValueError, match=message):
        check_tables(np.asarray(tables, np.int32), np.asarray(lengths, np.int32), 3, 8)


def test_check_tables_lets_good_tables_pass():
    tables = np.asarray([[2, 3], [0, 2**31 - 1], [3, 3], [0, 1]], np.int32)
    check_tables(jnp.asarray(tables), jnp.asarray([8, 1, 0, 16], jnp.int32), 3, 8)


def test_check_ragged_lets_good_batches_pass():
    kv_lengths, starts = np.asarray([4, 0, 9], np.int32), np.asarray([0, 4, 4, 5], np.int32)
    check_ragged(kv_lengths, starts)
    check_ragged(kv_lengths, starts, num_queries=8)


@pytest.mark.parametrize(
    ("kv_lengths", "cu_q_lengths", "message"),
    [
        ([1], [0, 1, 1], r"cu_q_lengths has shape \(3,\); kv_lengths has 1 entries"),
        ([-1], [0, 0], r"kv_lengths\[0\] is -1"),
        ([1], [[0, 1]], "cu_q_lengths has shape .*it must have 1 axes"),
    ],
)
def test_check_ragged_shapes_and_signs(kv_lengths, cu_q_lengths, message):
    with pytest.raises(ValueError, match=message):
        check_ragged(np.asarray(kv_lengths, np.int32), np.asarray(cu_q_lengths, np.int32))


def test_value_checks_want_int32_and_values():
    lengths = np.asarray([1], np.int32)
    with pytest.raises(ValueError, match="block_tables is int64; it must be int32"):
        check_tables(np.asarray([[0]], np.int64), lengths, 3, 8)
    with pytest.raises(ValueError, match=r"lengths is traced .*check it before calling jit"):
        jax.jit(lambda tokens: check_tables(np.zeros((1, 1), np.int32), tokens, 3, 8))(lengths)
