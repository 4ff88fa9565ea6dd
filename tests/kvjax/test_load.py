import pathlib
import sys
import types
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import load
from kvjax.errors import KvjaxError, ModelNotFoundError
from kvjax.load import resolve_dtype
from kvjax.models import read_gguf, save_orbax
from kvjax.registry import model_path
from kvjax.storage.tensor_file import write_tensors
from tests.kvjax.tiny_gguf import HIDDEN, VOCABULARY, write_gguf

load_module = sys.modules["kvjax.load"]  # kvjax.load is the function


@pytest.fixture
def tiny(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


def cached_files(cache):
    return sorted((cache / "weights").glob("*")) if (cache / "weights").exists() else []


def flat(model):
    found = {}

    def walk(node, path):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, (*path, str(key)))
            else:
                found[".".join((*path, str(key)))] = np.asarray(value)

    walk(model.params, ())
    return found


def assert_same_weights(model, checkpoint):
    found = flat(model)
    assert found.keys() == checkpoint.weights.keys()
    for name, values in checkpoint.weights.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_path_becomes_a_model(tiny, tmp_path):
    model = load(tiny, dtype="float32", cache_dir=tmp_path / "cache")
    assert model.name == "tiny"
    assert model.dtype == "float32"
    assert model.config.architecture == "llama"
    assert model.tokenizer.decode(model.tokenizer.encode("ab a!")) == "ab a!"
    assert model.spec.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert_same_weights(model, read_gguf(tiny))


def test_dequantized_weights_are_kept_and_mapped_the_next_time(tiny, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    load(tiny, dtype="float32", cache_dir=cache)
    (kept,) = cached_files(cache)
    before = kept.stat()
    monkeypatch.setattr(load_module, "gguf_weights", None)  # not called again
    model = load(tiny, dtype="float32", cache_dir=cache)
    assert_same_weights(model, read_gguf(tiny))
    assert kept.stat() == before


def test_the_cache_belongs_to_the_content_not_to_the_name(tiny, tmp_path):
    cache = tmp_path / "cache"
    first = load(tiny, dtype="float32", cache_dir=cache)
    content = bytearray(tiny.read_bytes())
    content[-8] ^= 1  # in the last tensor's data
    tiny.write_bytes(content)
    second = load(tiny, dtype="float32", cache_dir=cache)
    assert len(cached_files(cache)) == 2
    assert_same_weights(second, read_gguf(tiny))
    assert any((flat(first)[name] != values).any() for name, values in flat(second).items())


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "other model"])
def test_a_damaged_cache_is_said_and_written_anew(tiny, tmp_path, damage):
    cache = tmp_path / "cache"
    load(tiny, cache_dir=cache)
    (kept,) = cached_files(cache)
    whole = kept.read_bytes()
    if damage == "other model":
        write_tensors(kept, {"embed.weight": np.zeros((VOCABULARY, HIDDEN), np.float32)})
    else:
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        kept.write_bytes(
            {"cut": whole[:-100], "flipped": flipped, "empty": b"", "foreign": b"x" * 500}[damage]
        )
    with pytest.warns(UserWarning, match="it is a cache and is written anew"):
        model = load(tiny, dtype="float32", cache_dir=cache)
    assert_same_weights(model, read_gguf(tiny))
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(tiny, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with (
        pytest.warns(UserWarning, match="is written anew"),
        pytest.warns(UserWarning, match="were not kept"),
    ):
        model = load(tiny, dtype="float32", cache_dir=tmp_path / "cache")
    assert_same_weights(model, read_gguf(tiny))


def test_a_disk_is_not_filled_with_a_cache(tiny, tmp_path, monkeypatch):
    nearly_full = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: nearly_full)
    with pytest.warns(UserWarning, match="were not kept"):
        load(tiny, cache_dir=tmp_path / "cache")
    assert cached_files(tmp_path / "cache") == []


def test_weights_that_are_not_quantized_are_not_kept(tmp_path):
    path = write_gguf(tmp_path / "plain.gguf", quantized=False)
    model = load(path, dtype="float32", cache_dir=tmp_path / "cache")
    assert cached_files(tmp_path / "cache") == []
    assert_same_weights(model, read_gguf(path))


def test_what_the_reader_makes_is_what_the_cache_version_says(tiny):
    """If this fails, readers give other names, order or values: raise _WEIGHTS_VERSION in load."""
    weights = read_gguf(tiny).weights
    names = zlib.crc32(",".join(weights).encode())
    values = zlib.crc32(b"".join(np.ascontiguousarray(w).tobytes() for w in weights.values()))
    assert (names, values) == (2222721275, 2773422155)


def test_progress_goes_from_start_to_end(tiny, tmp_path):
    calls = []
    load(tiny, cache_dir=tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(phase for phase, _ in calls)) == ["check", "weights", "device"]
    for phase in ("check", "weights", "device"):
        shares = [share for name, share in calls if name == phase]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_folders_of_the_other_formats_open_too(tiny, tmp_path):
    save_orbax(tmp_path / "saved", read_gguf(tiny))
    model = load(tmp_path / "saved", dtype="float32", cache_dir=tmp_path / "cache")
    assert model.name == "saved"
    assert_same_weights(model, read_gguf(tiny))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load(tmp_path / "empty")


def test_a_name_is_found_in_the_cache_or_says_how_to_get_it(tiny, tmp_path):
    with pytest.raises(ModelNotFoundError, match="`kvjax pull smollm2-135m` fetches it"):
        load("smollm2-135m", cache_dir=tmp_path)
    with pytest.raises(ModelNotFoundError, match="`kvjax pull hf:org/name` fetches it"):
        load("hf:org/name", cache_dir=tmp_path)
    path = model_path("smollm2-135m", tmp_path)
    path.parent.mkdir(parents=True)
    tiny.rename(path)
    assert load("smollm2-135m", cache_dir=tmp_path).name == "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("/no/such/file.gguf", "there is no file or folder /no/such/file.gguf"),
        ("model.gguf", "there is no file or folder model.gguf"),
        (pathlib.Path("absent"), "there is no file or folder absent"),
        (pathlib.Path("smollm2-135m"), "there is no file or folder smollm2-135m"),
        ("./smollm2-135m", r"there is no file or folder \./smollm2-135m"),
        ("", "name_or_path is '': must be a model's name"),
        (None, "name_or_path is None: must be a model's name"),
        ("hf:name", "write hf:ORG/NAME"),
    ],
)
def test_what_is_not_there_is_said(name, message, tmp_path):
    with pytest.raises(KvjaxError, match=message):
        load(name, cache_dir=tmp_path)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(KvjaxError, match=r"text\.gguf: not a GGUF file"):
        load(tmp_path / "text.gguf")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-200])
    with pytest.raises(KvjaxError, match=r"cut\.gguf: truncated"):
        load(tmp_path / "cut.gguf")
    write_gguf(tmp_path / "foreign.gguf", architecture="mamba")
    with pytest.raises(KvjaxError, match=r"general\.architecture is 'mamba'"):
        load(tmp_path / "foreign.gguf")
    write_gguf(tmp_path / "nan.gguf", nan=True)
    with pytest.raises(KvjaxError, match=r"layers\.1\.mlp\.up\.weight holds NaN"):
        load(tmp_path / "nan.gguf", cache_dir=tmp_path / "cache")


def test_dtypes(tiny, tmp_path):
    model = load(tiny, dtype="bfloat16", cache_dir=tmp_path / "cache")
    assert model.dtype == "bfloat16"
    assert model.params["embed"]["weight"].dtype == jnp.bfloat16
    assert (resolve_dtype("bf16"), resolve_dtype("fp32")) == ("bfloat16", "float32")
    with pytest.raises(KvjaxError, match="dtype is 'float16': must be 'auto'"):
        load(tiny, dtype="float16")
    with pytest.raises(ValueError, match="float64"):
        resolve_dtype("float64")
    assert resolve_dtype("auto") in ("float32", "bfloat16")


def test_auto_is_bfloat16_on_accelerators(monkeypatch):
    for platform, native, expected in [
        ("tpu", False, "bfloat16"),
        ("gpu", False, "bfloat16"),
        ("cpu", False, "float32"),
        ("cpu", True, "bfloat16"),
    ]:
        monkeypatch.setattr(load_module, "target_platform", lambda platform=platform: platform)
        monkeypatch.setattr(load_module, "cpu_multiplies_bfloat16", lambda native=native: native)
        assert resolve_dtype("auto") == expected


@pytest.mark.slow
def test_the_real_model_loads_twice_alike(gguf_file, tmp_path):
    path = gguf_file("smollm2-135m")
    first = load(path, dtype="float32", cache_dir=tmp_path)
    second = load(path, dtype="float32", cache_dir=tmp_path)
    found = flat(second)
    for name, values in flat(first).items():
        np.testing.assert_array_equal(found[name], values)
    assert first.tokenizer.encode("Whales") == second.tokenizer.encode("Whales")
