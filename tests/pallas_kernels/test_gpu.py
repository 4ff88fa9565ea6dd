"""The Triton kernels lower for CUDA; what they compute is `test_conformance.py`'s business."""

import functools

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.pallas_kernels.conformance import API, DECODE, RAGGED, build

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
CASES = [("paged_attention", case) for case in DECODE]
CASES += [("ragged_paged_attention", case) for case in RAGGED]


# JAX 0.11 and later say that the backend will go; the kernels' docstrings say so too.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("op", "case"), CASES, ids=lambda value: getattr(value, "name", value))
def test_lowers_for_cuda(op, case):
    arrays, options = build(op, case)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    function = functools.partial(API[op], **options, implementation="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H100)):
        lowered = jax.jit(function).trace(**shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1
