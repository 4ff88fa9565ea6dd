"""Orbax checkpoints: whole, sharded, and damaged."""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import Checkpoint, read, read_gguf, read_orbax, save_orbax

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent


def test_a_checkpoint_comes_back(tiny_gguf, tmp_path):
    first = read_gguf(tiny_gguf())
    narrow = {
        "layers.0.mlp.up.weight": first.weights["layers.0.mlp.up.weight"].astype(jnp.bfloat16)
    }
    saved = Checkpoint(first.config, {**first.weights, **narrow}, first.tokenizer)
    save_orbax(tmp_path / "saved", saved)
    again = read(tmp_path / "saved")
    assert again.config == first.config
    assert set(again.weights) == set(first.weights)
    for name, values in saved.weights.items():
        assert again.weights[name].dtype == values.dtype
        np.testing.assert_array_equal(again.weights[name], values, err_msg=name)
    text = "abc 12<|im_end|>"
    assert again.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert again.tokenizer.to_dict() == first.tokenizer.to_dict()


def test_an_existing_folder_is_not_overwritten(tiny, tmp_path):
    save_orbax(tmp_path / "saved", tiny)
    with pytest.raises(ValueError, match="is already there"):
        save_orbax(tmp_path / "saved", tiny)
    assert read_orbax(tmp_path / "saved").tokenizer is None


def test_a_wrong_checkpoint_is_not_saved(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"embed\.weight .* is missing"):
        save_orbax(tmp_path / "saved", Checkpoint(tiny.config, {}))
    assert not (tmp_path / "saved").exists()


DAMAGED = """
import pathlib, shutil, sys
from kvjax.models import read_orbax
whole = pathlib.Path(sys.argv[1])
for lost in ("description", "weights", "weights/d", "weights/manifest.ocdbt"):
    damaged = whole.parent / "damaged"
    shutil.copytree(whole, damaged)
    if (damaged / lost).is_dir():
        shutil.rmtree(damaged / lost)
    else:
        (damaged / lost).unlink()
    try:
        read_orbax(damaged)
    except ValueError as error:
        print(str(error).split(" cannot")[0])
    shutil.rmtree(damaged)
"""


def python(program, tmp_path, **environment):
    """What a program prints, run in a process of its own on the checkpoint `tmp_path / "saved"`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path / "saved")],
        env={
            "PYTHONPATH": str(REPOSITORY),
            "JAX_PLATFORMS": "cpu",
            "HOME": str(tmp_path),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_damaged_folders_are_told(tiny, tmp_path):
    # In a process of its own: reads that Orbax gave up on end later, and complain in its threads.
    save_orbax(tmp_path / "saved", tiny)
    said = python(DAMAGED, tmp_path).splitlines()
    assert said == [f"{tmp_path / 'damaged'}: {item}" for item in ("description", *["weights"] * 3)]
    with pytest.raises(ValueError, match="no such folder"):
        read_orbax(tmp_path / "nowhere")


SHARDED = """
import sys, jax, numpy as np
from kvjax.models import build, parameters, read_orbax
from jax.sharding import NamedSharding, PartitionSpec
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
plain = read_orbax(sys.argv[1])
rows = {n: NamedSharding(mesh, PartitionSpec("model")) for n, w in plain.weights.items()
        if w.ndim == 2}
sharded = read_orbax(sys.argv[1], shardings=rows)
for name, values in plain.weights.items():
    got = sharded.weights[name]
    if name in rows:
        assert {s.data.shape[0] for s in got.addressable_shards} == {values.shape[0] // 4}, name
    np.testing.assert_array_equal(got, values)
params = build(sharded, "bfloat16", shardings=rows)[1]
assert params["embed"]["weight"].sharding == rows["embed.weight"]
params = build(plain, shardings=rows)[1]
assert params["layers"][1]["mlp"]["up"]["weight"].sharding == rows["embed.weight"]
print("sharded")
"""


def test_sharded_restore_over_four_devices(tiny, tmp_path):
    save_orbax(tmp_path / "saved", tiny)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert python(SHARDED, tmp_path, **devices) == "sharded\n"
