"""Attention over latents: the shared body, races, choices of tokens, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import (
    latent_attention,
    merge_attention,
    pages_of_tokens,
    ragged_latent_attention,
    sparse_latent_attention,
    token_latent_attention,
)
from kvjax.pallas_kernels.mosaic import tiles
from tests.pallas_kernels.float8_batches import packed
from tests.pallas_kernels.latent_conformance import (
    CASES,
    GPU_CASES,
    XLA_CASES,
    Case,
    assert_close,
    batch_and_answer,
    build,
    check,
    compiled,
    expected,
    quick,
    run,
)
from tests.pallas_kernels.races import WATCHED, assert_no_race


def each(implementations, cases):
    """Every implementation of one case after the other: they share its batch and its answer."""
    return [
        pytest.param(implementation, case, id=f"{implementation}-{case.name}")
        for case in cases
        for implementation in implementations
    ]


@pytest.mark.parametrize(
    ("implementation", "case"),
    each(("reference", "xla", "tpu"), CASES)
    + each(("xla",), XLA_CASES)
    + each(("gpu",), GPU_CASES),
)
def test_equals_attention_to_expanded_keys_and_values(implementation, case):
    check(implementation, case)


def test_no_race_between_copies_and_computation(capfd, monkeypatch):
    case = Case("tokens", page_size=64, heads=2)
    monkeypatch.setattr(tiles, "MAX_KV_TOKENS", 128)
    monkeypatch.setattr(tiles, "DECODE_ROWS", 16)

    def attend():
        arrays, (_, _, w_uv), _, wanted = batch_and_answer(case)
        assert_close(case, run("tpu", case, arrays, WATCHED), wanted, w_uv, slice(None))

    assert_no_race(capfd, attend)


def test_tokens_become_the_pages_that_hold_them():
    rng = np.random.default_rng(0)
    tables = rng.permutation(21).reshape(3, 7).astype(np.int32)
    choice = np.full((3, 6), -1, np.int32)
    choice[0] = [3, 50, 3, 8, 55, 9]  # one of them twice
    choice[1, :2] = [0, 56]  # the second is past the table
    listed = quick(pages_of_tokens, num_pages=21, page_size=8)(choice, tables)
    for row in range(3):
        tokens = {int(token) for token in choice[row] if 0 <= token < 56}
        pages = sorted({token // 8 for token in tokens})
        found = [int(page) for page in listed.page_ids[row] if page < 21]
        assert found == list(tables[row, pages])
        held = np.argwhere(np.asarray(listed.page_tokens[row])).tolist()
        assert {pages[entry] * 8 + slot for entry, slot in held} == tokens
        assert (listed.pages[row], listed.tokens[row]) == (len(pages), len(tokens))
    assert int(listed.pages[0]) * 8 / int(listed.tokens[0]) == 3 * 8 / 5  # the amplification


def test_all_tokens_chosen_is_attention():
    """A budget that covers the context is exactly dense, whatever the order of the tokens."""
    case = XLA_CASES[0]
    arrays, (_, _, w_uv), _, wanted = batch_and_answer(case)
    arrays = dict(arrays)
    tables, lengths = arrays.pop("block_tables"), np.asarray(arrays.pop("lengths"))
    slots = np.arange(tables.shape[1] * case.page_size, dtype=np.int32)[None, ::-1]
    tokens = np.where(slots < lengths[:, None], slots, -1)

    def attend(arrays, tables, tokens):
        pages = arrays["latents"].shape[0]
        listed = pages_of_tokens(tokens, tables, num_pages=pages, page_size=case.page_size)
        lists = {"page_ids": listed.page_ids, "page_tokens": listed.page_tokens}
        return sparse_latent_attention(**arrays, **lists, scale=case.scale), listed

    result, listed = quick(attend)(arrays, tables, tokens)
    plain = dataclasses.replace(case, page_stats=False)
    assert_close(plain, result, wanted, w_uv, slice(None))
    np.testing.assert_array_equal(listed.tokens, lengths)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "case", [Case(), Case(page_size=24), Case(page_size=12), Case(packed="int8")]
)
def test_named_tokens_are_attended_to(implementation, case):
    """In parts of a page, single tokens or whole pages: what is read with them does not count."""
    arrays, projections, sees = build(case)
    rng = np.random.default_rng(1)
    tables, lengths = arrays.pop("block_tables"), np.asarray(arrays.pop("lengths"))
    slots = tables.shape[1] * case.page_size
    names = rng.choice([slots, slots + 9, -1, 2**31 - 1], (len(lengths), 40))
    chosen = []
    for row, length in enumerate(lengths):
        tokens = rng.permutation(length)[:30]
        names[row, rng.permutation(40)[: len(tokens)]] = tokens
        chosen.append((sees[row][0], np.sort(tokens)))
    wanted = expected(case, arrays, projections, chosen)
    function = functools.partial(
        token_latent_attention, scale=case.scale, implementation=implementation
    )
    result = quick(function)(**arrays, token_ids=jnp.asarray(names, jnp.int32), block_tables=tables)
    assert_close(case, result, wanted, projections[2], slice(None))


def test_lists_and_tables_of_tokens_are_refused_by_name():
    arrays, _, _ = build(Case())
    del arrays["lengths"]
    given = arrays | {"token_ids": jnp.zeros((7, 3), jnp.int32), "scale": 0.2}
    for changed, message in (
        ({"token_ids": jnp.zeros((6, 3), jnp.int32)}, "token_ids has 6 rows and q_latent 7"),
        ({"token_ids": jnp.zeros((7, 0), jnp.int32)}, "token_ids has shape .* at least one entry"),
        ({"block_tables": jnp.zeros((1, 3), jnp.int32)}, "block_tables has 1 rows and q_latent 7"),
        ({"implementation": "gpu"}, "of latent_attention cannot run: it needs an NVIDIA GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            token_latent_attention(**given | changed)


def test_parts_merge_to_the_whole():
    """Pages that are here and pages that came, attended apart, are the list attended at once."""
    case = XLA_CASES[-1]
    arrays, (_, _, w_uv), _, wanted = batch_and_answer(case)

    def in_parts(arrays):
        parts = [
            sparse_latent_attention(
                **arrays | {name: arrays[name][:, at] for name in ("page_ids", "page_tokens")},
                scale=case.scale,
                implementation="reference",
            )
            for at in (slice(0, 2), slice(2, None))
        ]
        return merge_attention(*map(jnp.stack, list(zip(*parts, strict=True))[:2]))

    merged = quick(in_parts)(arrays)
    plain = dataclasses.replace(case, page_stats=False)
    assert_close(plain, merged, wanted, w_uv, slice(None))


def test_new_tables_do_not_compile_again():
    case = XLA_CASES[1]
    for seed in range(3):
        run("xla", case, build(case, seed)[0])
    assert compiled("xla", case, None)._cache_size() == 1


@pytest.mark.parametrize(
    ("form", "changed", "message"),
    [
        ("decode", {"q_latent": (8, 3, 48)}, "q_rope is float32 .7, 3, 16. and q_latent"),
        ("decode", {"q_rope": (7, 2, 16)}, "two parts of the same queries"),
        ("decode", {"q_rope": (7, 3, 8)}, "q_rope has 8 elements a head and ropes 16 a token"),
        ("decode", {"latents": (9, 16, 64)}, "q_latent has 48 elements a head and latents 64"),
        ("decode", {"latents": (9, 1, 16, 48)}, r"latents has shape .*it must be \[N, P, Dc\]"),
        ("decode", {"ropes": (9, 16, 16)}, r"ropes has shape \(9, 16, 16\) and latents"),
        ("decode", {"latents": (9, 4, 48)}, r"page_size \(axis 1 of latents\) is 4; it must be"),
        ("decode", {"lengths": (6,)}, r"lengths has shape \(6,\); block_tables has 7 rows"),
        ("decode", {"block_tables": (7, 0)}, "every axis needs at least one entry"),
        ("decode", {"block_tables": (6, 4), "lengths": (6,)}, "q_latent has 7 rows"),
        ("ragged", {"cu_q_lengths": (5,)}, r"cu_q_lengths has shape \(5,\).*must be \(6,\)"),
        ("sparse", {"page_ids": (5, 5)}, "page_ids has 5 rows and q_latent 4"),
        ("sparse", {"page_tokens": (4, 6)}, r"page_tokens is int32 \(4, 6\); it must be int32 "),
        ("tokens", {"page_tokens": (4, 5, 8)}, r"or bool \(4, 5, 16\), which do"),
    ],
)
def test_shapes_are_refused_by_name(form, changed, message):
    arrays, _, _ = build(Case(form))
    for name, shape in changed.items():
        arrays[name] = jnp.zeros(shape, arrays[name].dtype)
    function = {"decode": latent_attention, "ragged": ragged_latent_attention}
    with pytest.raises(ValueError, match=message):
        function.get(form, sparse_latent_attention)(**arrays, scale=0.2)


def test_other_bad_arguments_are_refused_by_name():
    arrays, _, _ = build(Case())

    def refused(message, scale=0.2, changed=(), **options):
        with pytest.raises(ValueError, match=message):
            latent_attention(**arrays | dict(changed), scale=scale, **options)

    for scale in (0.0, -1.0, float("nan")):
        refused("scale is", scale)
    refused("page_stats is 1; it must be True or False", page_stats=1)
    refused("lengths is uint16", changed={"lengths": arrays["lengths"].astype("uint16")})
    refused("latents is int32", changed={"latents": arrays["latents"].astype("int32")})
    refused("ropes is float16 and latents is", changed={"ropes": arrays["ropes"].astype("float16")})
    heads = packed(np.zeros((9, 2, 16, 48), np.int8), np.ones((9, 2, 1, 1), np.float32))
    refused("latents is packed with 2 heads", changed={"latents": heads})
    for implementation in ("tpu", "gpu"):
        refused("of latent_attention cannot run: it needs", implementation=implementation)
    with pytest.raises(TypeError, match="scale"):
        latent_attention(**arrays)


def test_a_pool_that_int32_cannot_index_is_refused():
    arrays, _, _ = build(Case())
    for name, dim in (("latents", 48), ("ropes", 16)):
        arrays[name] = jax.ShapeDtypeStruct((2**22, 16, dim), jnp.float32)
    with pytest.raises(ValueError, match=r"latents has 4194304 pages.*at most 2796202 pages"):
        latent_attention(**arrays, scale=0.2)
