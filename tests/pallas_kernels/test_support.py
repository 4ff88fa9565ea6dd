import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.pallas_kernels import IMPLEMENTATIONS, OPERATIONS, supported, target_platform
from kvjax.pallas_kernels.support import choose
from tests.pallas_kernels.conformance import API, Case, build

ORDINARY = {"head_dim": 128, "v_head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16}
every = pytest.mark.parametrize("op", OPERATIONS)
of_heads = pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "latent_attention"])
both = pytest.mark.parametrize("op", API)  # the two that share a test body


def on(platform):
    """A context in which programs are for another machine."""
    kind = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H100 80GB HBM3"}[platform]
    device = AbstractDevice(kind, 1, platform)
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@every
def test_reference_and_xla_run_everywhere(op):
    for platform in ("cpu", "tpu", "gpu"):
        for name in ("reference", "xla"):
            assert supported(op, name, platform=platform, head_dim=24, page_size=12) is None


@every
@pytest.mark.parametrize(
    ("implementation", "platform", "shape", "reason"),
    [
        ("tpu", "cpu", {}, "it needs a TPU and this program is for cpu"),
        ("tpu", "gpu", {}, "it needs a TPU and this program is for gpu"),
        ("tpu", "tpu", {"page_size": 12}, "page_size is 12 and"),
        ("tpu", "tpu", {"dtype": jnp.float16}, "the arrays are float16 and"),
        ("gpu", "cpu", {}, "it needs an NVIDIA GPU and this program is for cpu"),
    ],
)
def test_reasons(op, implementation, platform, shape, reason):
    said = supported(op, implementation, platform=platform, **(ORDINARY | shape))
    assert said is not None
    assert re.match(reason, said)


@of_heads
@pytest.mark.parametrize(
    ("platform", "shape", "reason"),
    [
        ("tpu", {"head_dim": 96}, "head_dim is 96 and"),
        ("tpu", {"v_head_dim": 96}, "the values' head_dim is 96 and"),
        ("gpu", {"head_dim": 512}, "head_dim is 512 and .* takes at most 256"),
        ("gpu", {"v_head_dim": 512}, "the values' head_dim is 512 and"),
    ],
)
def test_widths_of_heads(op, platform, shape, reason):
    said = supported(op, platform, platform=platform, **(ORDINARY | shape))
    assert said is not None
    assert re.match(reason, said)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("rope", "latent", "reason"),
    [
        (64, 512, None),
        (12, 100, None),
        (257, 512, "a position key has 257 elements and the kernels take at most 256"),
        (64, 576, "a latent has 576 elements and the kernels take at most 512"),
    ],
)
def test_widths_of_latents(platform, rope, latent, reason):
    shape = {"head_dim": rope, "v_head_dim": latent}
    said = supported("latent_attention", platform, platform=platform, **(ORDINARY | shape))
    assert said == reason


@every
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_take_the_usual_shapes(op, head_dim, page_size, dtype):
    shape = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    for implementation in ("tpu", "gpu"):
        assert supported(op, implementation, platform=implementation, **shape) is None


@every
def test_a_tpu_gets_its_kernel_and_a_gpu_gets_xla(op):
    assert choose(op, None, **ORDINARY) == "xla"
    with on("tpu"):
        assert choose(op, None, **ORDINARY) == "tpu"
        assert choose(op, None, **(ORDINARY | {"head_dim": 300})) == "xla"
    with on("gpu"):
        assert choose(op, None, **ORDINARY) == "xla"
        assert choose(op, "gpu", **ORDINARY) == "gpu"


@both
def test_a_named_implementation_that_cannot_run_never_falls_back(op):
    arrays, options = build(op, Case())
    for implementation in ("tpu", "gpu"):
        with pytest.raises(
            ValueError, match=f"implementation='{implementation}' of {op} cannot run: it needs"
        ):
            API[op](**arrays, **options, implementation=implementation)


@both
@pytest.mark.parametrize("implementation", ["triton", "", "XLA", 3])
def test_unknown_names(op, implementation):
    arrays, options = build(op, Case())
    with pytest.raises(ValueError, match=r"it must be None .* or one of reference, xla, tpu, gpu"):
        API[op](**arrays, **options, implementation=implementation)


def test_unknown_operation():
    with pytest.raises(ValueError, match="op is 'flash'; it must be one of paged_attention"):
        supported("flash", IMPLEMENTATIONS[0])


def test_target_platform_is_where_the_program_will_run():
    assert target_platform() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert target_platform() == "cpu"
        with on("tpu"):
            assert target_platform() == "tpu"
    with on("gpu"):
        assert target_platform() == "gpu"
