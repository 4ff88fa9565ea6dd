"""The count of both forms of attention over latents, against counting one by one."""

import pytest

from kvjax.pallas_kernels import LatentDims, absorbed_or_expanded

V3 = LatentDims(latent=512, rope=64, nope=128, value=128)


def test_flops_are_those_of_every_product():
    queries, context, heads, dims = 3, 7, 2, LatentDims(latent=5, rope=2, nope=4, value=6)
    absorbed = expanded = 0
    for _ in range(heads):
        for query in range(queries):
            absorbed += dims.nope * dims.latent + dims.latent * dims.value
            for _ in range(context - queries + query + 1):
                absorbed += dims.latent + dims.rope + dims.latent
                expanded += dims.nope + dims.rope + dims.value
        expanded += context * dims.latent * (dims.nope + dims.value)
    forms = absorbed_or_expanded(queries, context, heads, dims)
    assert (forms.absorbed.flops, forms.expanded.flops) == (2 * absorbed, 2 * expanded)


def test_bytes_are_those_of_every_array():
    queries, context, heads, dims = 3, 7, 2, LatentDims(latent=5, rope=2, nope=4, value=6)
    both = 7 * (5 + 2) + 2 * 5 * (4 + 6) + 3 * 2 * (4 + 2 + 6)
    latent_space = 2 * (3 * 2 * 5 + 3 * 2 * 5)  # queries and outputs, written and read
    keys_and_values = 2 * 7 * 2 * (4 + 6)
    forms = absorbed_or_expanded(queries, context, heads, dims, itemsize=4)
    assert forms.absorbed.bytes == 4 * (both + latent_space)
    assert forms.expanded.bytes == 4 * (both + keys_and_values)


def test_a_decode_is_absorbed_and_a_prompt_expanded():
    assert absorbed_or_expanded(1, 131_072, 128, V3).cheaper == "absorbed"
    assert absorbed_or_expanded(8192, 8192, 128, V3).cheaper == "expanded"
    # Products decide between many queries: 768 more a pair against 131,072 a token.
    cheaper = [absorbed_or_expanded(q, 131_072, 128, V3).cheaper for q in range(1, 400)]
    assert cheaper == ["absorbed"] * 170 + ["expanded"] * 229


def test_what_is_moved_decides_where_moving_is_dear():
    """Expanded keys and values of one query are written and read for it alone."""
    forms = absorbed_or_expanded(1, 4096, 16, V3)
    assert forms.expanded.bytes > 8 * forms.absorbed.bytes
    dear = forms.absorbed.at(flops_per_byte=1e6)
    assert dear == forms.absorbed.bytes * 1e6 > forms.absorbed.flops


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8, 2, V3), {}, "queries is 0; it must be at least 1"),
        ((1, 8, 0, V3), {}, "heads is 0; it must be at least 1"),
        ((1, 8, 2, V3._replace(rope=0)), {}, "dims.rope is 0"),
        ((9, 8, 2, V3), {}, "queries is 9 and context 8; queries are a sequence's last"),
        ((1, 8, 2, V3), {"itemsize": 0}, "itemsize is 0"),
        ((1, 8, 2, V3), {"flops_per_byte": 0.0}, "flops_per_byte is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        absorbed_or_expanded(*arguments, **options)
