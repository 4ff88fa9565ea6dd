"""Whose pages serve whom: every setting that changes keys or values is part of a prefix's name."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig
from kvjax.decode.identity import identity
from kvjax.decode.prefilled_pages import prefilled_pages
from kvjax.models import ModelConfig
from kvjax.storage.prefetch import Prefetcher
from kvjax.storage.tiers import Tiers
from tests.kvjax.decode import tiny

LOAD = PrefixConfig(load_policy="load", budget="100%")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def answer(model, ids, prefixes, cache):
    result = kvjax.generate(
        model, ids, max_new_tokens=4, stop_at_eos=False, cache=cache, prefixes=prefixes
    )
    return result.tokens[0], result.stats.prefix


def other_value(value):
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}, but otherwise"
    return 0.5 if value is None else None


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_every_field_of_a_model_changes_the_name(model, field):
    config = dataclasses.replace(model.config)
    object.__setattr__(config, field, other_value(getattr(config, field)))  # valid or not
    other = dataclasses.replace(model)
    object.__setattr__(other, "config", config)
    assert identity(other, "float32").numerics != identity(model, "float32").numerics
    assert identity(model, "bfloat16") != identity(model, "float32")


@pytest.mark.parametrize("read_by", ["head", "layer", "period"])
@pytest.mark.parametrize("written_by", ["head", "layer", "period"])
def test_what_one_layout_wrote_another_reads(tmp_path, model, written_by, read_by):
    """Units of any shape serve a choice by head, by layer or by period."""
    cache = CacheConfig(page_size=8)
    ids = tiny.prompt(90)
    config = dataclasses.replace(LOAD, period=2)
    writer = PrefixCache(tmp_path, config=dataclasses.replace(config, who=written_by))
    writer.add(model, ids[:70], cache=cache)
    reader = PrefixCache(tmp_path, config=dataclasses.replace(config, who=read_by))
    tokens, stats = answer(model, ids, reader, cache)
    assert tokens == answer(model, ids, None, cache)[0]
    assert stats.pages == 8


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_pages_of_every_size_are_stored_and_read(tmp_path, model, page_size):
    cache = CacheConfig(page_size=page_size)
    ids = tiny.prompt(3 * page_size + 20)
    prefixes = PrefixCache(tmp_path, config=LOAD)
    prefixes.add(model, ids[: 3 * page_size + 5], cache=cache)
    tokens, stats = answer(model, ids, prefixes, cache)
    assert tokens == answer(model, ids, None, cache)[0]
    assert (stats.pages, stats.page_size) == (3, page_size)


def test_stored_pages_are_those_of_the_pool(tmp_path, model):
    """To the last bit, unit by unit."""
    ids = tiny.prompt(50)
    pages = prefilled_pages(model, ids, CacheConfig(page_size=8), 512, lambda *_: None)
    prefixes = PrefixCache(tmp_path, config=LOAD)
    info = prefixes.put(model, ids, pages)
    with prefixes.store.open_segment(info.key) as segment:
        units = np.array(list(np.ndindex(segment.grid.units)), np.int32)
        tiers = Tiers(0, segment.unit_shape, segment.grid.numpy_dtype)
        with Prefetcher(segment.read, tiers) as reader:
            found = reader.collect(reader.issue(units, demand=True))
    for (layer, head, _, page), unit in zip(units.tolist(), found, strict=True):
        np.testing.assert_array_equal(unit[0, 0, 0], pages.keys[layer, page, head])
        np.testing.assert_array_equal(unit[0, 0, 1], pages.values[layer, page, head])
