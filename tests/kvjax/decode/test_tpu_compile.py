"""The whole of `generate` compiled for a TPU, on a machine that has none."""

import re

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, inputs
from kvjax.decode.generate import _generate
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import plan
from kvjax.decode.step import Rules
from kvjax.model import from_checkpoint
from kvjax.models import LayerConfig, ModelConfig, random_checkpoint

CONFIG = ModelConfig("llama", 512, 256, 512, (LayerConfig(4, 2, 128),), max_context=4096)
PAGES = 512


@pytest.fixture
def device(monkeypatch):
    pytest.importorskip("libtpu", reason="no libtpu: `pip install libtpu` compiles without a TPU")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # test workers load it side by side
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]


@pytest.mark.slow
def test_prefill_and_loop_use_the_mosaic_kernels_and_copy_no_pool(device):
    model = from_checkpoint(random_checkpoint(CONFIG), name="random", dtype="bfloat16")
    shapes = plan(
        CONFIG,
        model.spec,
        [600, 3],
        new_tokens=32,
        prefill_chunk=256,
        cache=CacheConfig(num_pages=PAGES),
    )
    arguments = (
        model.params,
        inputs.flat_prompts([[1] * 600, [2] * 3], shapes),
        Rules(
            sampler=make_sampler(Sampling(temperature=0.8, top_p=0.9), CONFIG.vocab_size),
            key=jax.random.key(0),
            stop_tokens=inputs.padded_stops([2]),
            limits=inputs.row_limits(2, 32, shapes.batch),
        ),
    )
    there = SingleDeviceSharding(device)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments
    )
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(lambda *args: _generate((model.graphdef, shapes), *args)).lower(*abstract)
    program = lowered.compile().as_text()
    assert program.count("tpu_custom_call") >= 2  # one in prefill, one in the decode loop
    assert not re.findall(rf"bf16\[{PAGES},2,16,128\]\S* (?:copy|transpose)\(", program)
