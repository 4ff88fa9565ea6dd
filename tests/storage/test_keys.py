"""Keys: the same for the same prefix on every machine, different for any other."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.storage.keys import Identity, page_keys, token_array

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BASE = Identity("w", "n", "a", "t", "i")
FIELDS = [field.name for field in dataclasses.fields(Identity)]


def test_one_key_for_each_full_page_and_each_names_all_tokens_up_to_its_end():
    tokens = list(range(11))
    keys = page_keys(BASE, "", tokens, 4)
    assert len(keys) == 2
    assert all(len(key) == 64 for key in keys)
    assert page_keys(BASE, "", tokens[:8], 4) == keys
    assert page_keys(BASE, "", tokens[:7], 4) == keys[:1]
    changed = page_keys(BASE, "", [99, *tokens[1:]], 4)
    assert not set(changed) & set(keys)


def test_no_full_page_has_no_key():
    assert page_keys(BASE, "", [1, 2, 3], 4) == []
    assert page_keys(BASE, "", [], 4) == []


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_the_identity_changes_every_key(field):
    """Weights, numerics (rope, dtype, norms), adapter, tenant and inputs are all in the key."""
    keys = page_keys(BASE, "", range(8), 4)
    other = page_keys(dataclasses.replace(BASE, **{field: "other"}), "", range(8), 4)
    assert not set(keys) & set(other)


def test_namespace_and_page_size_change_every_key():
    keys = page_keys(BASE, "", range(8), 4)
    assert not set(keys) & set(page_keys(BASE, "layout", range(8), 4))
    assert not set(keys) & set(page_keys(BASE, "", range(8), 2))
    assert not set(keys) & set(page_keys(BASE, "", range(8), 8))


texts = st.text(alphabet="ab\0:,1", max_size=4)
names = st.tuples(texts.filter(bool), texts, texts, texts, texts, texts)


@settings(max_examples=300, deadline=None)
@given(names, names)
def test_no_two_different_inputs_are_the_same_bytes(one, two):
    """The encoding is injective: equal text in another field, or moved between fields, differs."""
    key = page_keys(Identity(*one[:5]), one[5], [1, 2], 2)
    other = page_keys(Identity(*two[:5]), two[5], [1, 2], 2)
    assert (key == other) == (one == two)


@pytest.mark.parametrize("left", range(5))
def test_a_byte_moved_to_the_next_field_is_another_key(left):
    fields = ["xx"] * 6
    moved = list(fields)
    moved[left], moved[left + 1] = "x", "xxx"
    keys = {tuple(page_keys(Identity(*f[:5]), f[5], [1], 1)) for f in (fields, moved)}
    assert len(keys) == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 7), st.integers(0, 40))
def test_two_prompts_share_exactly_the_keys_of_their_common_pages(tokens, size, place):
    other = list(tokens)
    if tokens:
        other[place % len(tokens)] ^= 1
    keys, others = (page_keys(BASE, "", ids, size) for ids in (tokens, other))
    same = [tokens[: (i + 1) * size] == other[: (i + 1) * size] for i in range(len(keys))]
    assert [a == b for a, b in zip(keys, others, strict=True)] == same


def test_any_sequence_of_whole_numbers_gives_the_same_keys():
    keys = page_keys(BASE, "", [1, 2, 3, 4], 2)
    for dtype in (np.uint8, np.int16, np.int32, np.int64, np.uint64):
        assert page_keys(BASE, "", np.array([1, 2, 3, 4], dtype), 2) == keys
    assert page_keys(BASE, "", (1, 2, 3, 4), 2) == keys


@pytest.mark.slow
def test_keys_are_the_same_in_every_process_and_the_ones_that_are_on_disks_already():
    """Keys are deterministic: no hash seed, no process id, no capacity is in them."""
    script = (
        "from kvjax.storage.keys import *\n"
        "print(page_keys(Identity('w', 'n', 'a', 't', 'i'), 'layout', [5, 6, 7], 1)[-1])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert seen == {"fa5dd2ba23b073cf78fd8df5b310c898417702de65a7a136024ff81db399b6e0"}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([0.5], "whole numbers"),
        ([[1, 2]], "one row"),
        ([True], "whole numbers"),
        ([-1], "0 .. 2147483647"),
        ([2**31], "0 .. 2147483647"),
        (["a"], "whole numbers"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, says):
    with pytest.raises(ValueError, match=says):
        page_keys(BASE, "", tokens, 1)


def test_token_arrays_are_copies_that_cannot_be_written():
    source = np.array([1, 2], np.int32)
    ids = token_array(source)
    source[0] = 9
    assert ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 3


def test_page_sizes_below_one_and_identities_without_weights_are_refused():
    with pytest.raises(ValueError, match="page_size is 0"):
        page_keys(BASE, "", [1], 0)
    with pytest.raises(ValueError, match=r"Identity\.weights is ''"):
        Identity("", "n")
    with pytest.raises(ValueError, match=r"Identity\.tenant is 5"):
        Identity("w", "n", tenant=5)
