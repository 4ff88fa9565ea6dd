import pytest

from tests.pallas_kernels.conformance import DECODE, RAGGED, check

IMPLEMENTATIONS = ("reference",)


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_equals_the_definition(implementation, case):
    check("paged_attention", implementation, case)


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ragged_equals_the_definition(implementation, case):
    check("ragged_paged_attention", implementation, case)
