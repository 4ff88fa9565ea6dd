"""The shared body on every implementation but the Mosaic kernels (`test_tpu_interpret.py`)."""

import pytest

from tests.pallas_kernels.conformance import DECODE, GPU_DECODE, GPU_RAGGED, RAGGED, check


def each(implementations, cases):
    """Every implementation of one case after the other: they share its batch and its answer."""
    return [
        pytest.param(implementation, case, id=f"{implementation}-{case.name}")
        for case in cases
        for implementation in implementations
    ]


@pytest.mark.parametrize(
    ("implementation", "case"),
    each(("reference", "xla"), DECODE) + each(("gpu",), GPU_DECODE),
)
def test_decode_equals_the_definition(implementation, case):
    check("paged_attention", implementation, case)


@pytest.mark.parametrize(
    ("implementation", "case"),
    each(("reference", "xla"), RAGGED) + each(("gpu",), GPU_RAGGED),
)
def test_ragged_equals_the_definition(implementation, case):
    check("ragged_paged_attention", implementation, case)
