"""`kvjax.spec`: the worked numbers of its docstrings, and what must hold for any layer stack."""

import dataclasses
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import spec as spec_module
from kvjax.formats import estimates
from kvjax.formats.estimates import quantized_bytes_per_element, residual_ratio
from kvjax.spec import (
    ITEM_BYTES,
    KVSpec,
    LayerSpec,
    pages_for,
    wasted_slots,
)

tokens = st.integers(0, 300)
page_sizes = st.sampled_from([1, 2, 8, 16, 128])
windows = st.none() | st.integers(1, 300)
stored_layers = st.builds(
    LayerSpec.gqa, st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.integers(1, 8), windows
) | st.builds(LayerSpec.mla, st.integers(1, 8), st.integers(0, 8), windows)


@st.composite
def specs(draw):
    """Any stack: stored layers of both kinds, then some that read one of them."""
    layers = draw(st.lists(stored_layers, min_size=1, max_size=4))
    readers = draw(st.lists(st.integers(0, len(layers) - 1), max_size=3))
    layers += [LayerSpec.shared_with(index) for index in readers]
    return KVSpec(tuple(layers), draw(st.sampled_from(sorted(ITEM_BYTES))))


def test_worked_numbers():
    """The docstrings hold the numbers of the articles; none may be skipped or wrong."""
    results = [doctest.testmod(module) for module in (spec_module, estimates)]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 24


def held_pages(layer, length, page_size):
    """Pages some visible slot lies in, counted slot by slot."""
    oldest = 0 if layer.window is None else max(0, length - layer.window)
    return {slot // page_size for slot in range(oldest, length)}


@given(specs(), tokens, page_sizes)
def test_sequence_bytes_count_the_visible_pages(spec, length, page_size):
    expected = sum(
        len(held_pages(layer, length, page_size)) * page_size * layer.elements_per_token
        for layer in spec.layers
    )
    assert spec.bytes_per_sequence(length, page_size) == expected * ITEM_BYTES[spec.dtype]


@given(specs(), tokens, st.lists(tokens, max_size=4), page_sizes)
def test_shared_prefix_counts_each_page_once(spec, prefix, suffixes, page_size):
    expected = 0
    for layer in spec.layers:
        pages = set()
        for owner, suffix in enumerate(suffixes):
            for page in held_pages(layer, prefix + suffix, page_size):
                pages.add(page if (page + 1) * page_size <= prefix else (owner, page))
        expected += len(pages) * page_size * layer.elements_per_token
    shared = spec.bytes_shared_prefix(prefix, suffixes, page_size)
    assert shared == expected * ITEM_BYTES[spec.dtype]
    apart = sum(spec.bytes_per_sequence(prefix + suffix, page_size) for suffix in suffixes)
    assert shared <= apart


@given(specs(), tokens, page_sizes)
def test_a_step_reads_no_more_than_is_held_unless_layers_share(spec, length, page_size):
    held = spec.bytes_per_sequence(length, page_size)
    read = spec.bytes_read_per_step(length)
    if all(layer.shared is None for layer in spec.layers):
        assert read <= held
        assert spec.bytes_read_per_step(length) == spec.bytes_per_sequence(length, 1)
    assert held <= pages_for(length, page_size) * spec.bytes_per_page(page_size)


@given(specs(), st.sampled_from([1, 2, 4, 8, 16]))
def test_sharding_loses_no_head_and_counts_the_copies(spec, num_devices):
    part = spec.shard(num_devices)
    assert part.dtype == spec.dtype
    for whole, share, copies in zip(
        spec.layers, part.layers, spec.replication(num_devices), strict=True
    ):
        assert share.elements_per_token * num_devices == whole.elements_per_token * copies
        assert (share.window, share.shared) == (whole.window, whole.shared)
    assert num_devices * part.bytes_per_token >= spec.bytes_per_token
    assert spec.shard(1) == spec


@given(tokens, page_sizes)
def test_waste_is_less_than_a_page(length, page_size):
    assert 0 <= wasted_slots(length, page_size) < page_size
    assert (length + wasted_slots(length, page_size)) % page_size == 0


@given(st.integers(1, 10_000), st.data())
def test_residual_ratio_lies_between_its_ends(length, data):
    residual = data.draw(st.integers(0, length))
    low = quantized_bytes_per_element(2, 32, 4)
    ratio = residual_ratio(length, residual, low, 2)
    assert low / 2 <= ratio <= 1
    assert residual_ratio(length, length, low, 2) == 1
    assert residual_ratio(length, 0, low, 2) == low / 2


@given(specs())
def test_equal_specs_hash_alike_and_survive_replace(spec):
    again = dataclasses.replace(spec, layers=tuple(dataclasses.replace(x) for x in spec.layers))
    assert again == spec
    assert hash(again) == hash(spec)


def test_value_dim_defaults_to_head_dim():
    assert LayerSpec.gqa(8, 128) == LayerSpec.gqa(8, 128, 128)
    assert LayerSpec.gqa(8, 128).v_head_dim == 128
    assert LayerSpec.gqa(8, 192, 128).elements_per_token == 8 * 320


def test_shared_layer_takes_everything_but_storage():
    spec = KVSpec((LayerSpec.mla(512, 64, window=99), LayerSpec.shared_with(0)))
    assert spec.layers[1] == dataclasses.replace(spec.layers[0], shared=0)
    assert [spec.source(layer) for layer in (0, 1)] == [0, 0]
    assert spec.bytes_per_token == 576 * 2


def test_sharding_keeps_a_latent_whole():
    spec = KVSpec((LayerSpec.mla(512, 64), LayerSpec.gqa(8, 128)))
    assert spec.replication(4) == (4, 1)
    assert spec.shard(4).layers == (LayerSpec.mla(512, 64), LayerSpec.gqa(2, 128))


GQA = LayerSpec.gqa(8, 128)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LayerSpec.gqa(0, 128), "kv_heads is 0"),
        (lambda: LayerSpec.gqa(8, -1), "head_dim is -1"),
        (lambda: LayerSpec.gqa(8, 128, 0), "v_head_dim is 0"),
        (lambda: LayerSpec.gqa(8, 128, window=0), "window is 0"),
        (lambda: LayerSpec.gqa(True, 128), "kv_heads is True: must be an integer"),
        (lambda: LayerSpec.mla(0, 64), "latent_dim is 0"),
        (lambda: LayerSpec.mla(512, -1), "rope_dim is -1"),
        (lambda: LayerSpec("mla", kv_heads=8, latent_dim=512), "kv_heads is 8: .* 'mla' has none"),
        (lambda: LayerSpec("gqa", 8, 128, rope_dim=64), "rope_dim is 64: .* 'gqa' has none"),
        (lambda: LayerSpec.shared_with(-1), "shared is -1"),
        (lambda: KVSpec(()), "layers is .*at least 1"),
        (lambda: KVSpec((GQA,), "int3"), "dtype is 'int3': must be one of float32, bfloat16"),
        (
            lambda: KVSpec((LayerSpec.shared_with(0),)),
            r"layers\[0\].shared is 0: .* none before it",
        ),
        (
            lambda: KVSpec((GQA, LayerSpec.shared_with(2), GQA)),
            r"layers\[1\].shared is 2: must name an earlier layer, 0 to 0",
        ),
        (
            lambda: KVSpec((GQA, LayerSpec.shared_with(0), LayerSpec.shared_with(1))),
            "stores nothing: name layer 0",
        ),
        (
            lambda: KVSpec((GQA, LayerSpec("gqa", 4, 128, shared=0))),
            r"sizes are not .* LayerSpec.shared_with\(0\)",
        ),
        (lambda: KVSpec((GQA,)).source(1), "layer is 1: must be 0 to 0"),
        (lambda: KVSpec((GQA,)).bytes_per_page(0), "page_size is 0"),
        (
            lambda: KVSpec((GQA,)).bytes_per_sequence(-1, 16),
            "tokens is -1: must be an integer of at least 0",
        ),
        (lambda: KVSpec((GQA,)).bytes_per_sequence(1, 0), "page_size is 0"),
        (lambda: KVSpec((GQA,)).bytes_shared_prefix(-1, [1]), "prefix is -1"),
        (lambda: KVSpec((GQA,)).step_read_seconds(1, 0.0), "bytes_per_second is 0.0"),
        (lambda: KVSpec((GQA,)).shard(0), "num_devices is 0"),
        (lambda: KVSpec((GQA,)).shard(3), "num_devices is 3: layer 0 has 8 KV heads"),
        (lambda: KVSpec((GQA,)).shard(12), "use a divisor or a multiple of 8"),
        (lambda: pages_for(-1, 16), "tokens is -1"),
        (lambda: wasted_slots(1, 0), "page_size is 0"),
        (lambda: quantized_bytes_per_element(0, 32, 4), "bits is 0"),
        (lambda: quantized_bytes_per_element(2, 0, 4), "group is 0"),
        (lambda: quantized_bytes_per_element(2, 32, -1), "metadata_bytes is -1"),
        (lambda: residual_ratio(10, 11, 0.375, 2), "residual is 11: must be 0 to tokens"),
        (lambda: residual_ratio(10, 1, 0.0, 2), "quantized_bytes is 0.0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
