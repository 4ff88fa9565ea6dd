"""GGUF files: read right, or refused with the file and the field."""

import zipfile

import gguf
import numpy as np
import pytest

from kvjax.models import GGUFFile, build, read_gguf
from kvjax.models.gguf_names import unpermute, weight_name

TYPES = gguf.GGMLQuantizationType


def test_weights_configuration_and_tokenizer_come_back(tiny, tiny_gguf):
    checkpoint = read_gguf(tiny_gguf())
    assert checkpoint.config.to_dict() | {"norm_eps": 0} == tiny.config.to_dict() | {"norm_eps": 0}
    assert checkpoint.config.norm_eps == pytest.approx(1e-5)
    assert set(checkpoint.weights) == set(tiny.weights)
    for name, values in tiny.weights.items():
        np.testing.assert_array_equal(checkpoint.weights[name], values, err_msg=name)
    assert checkpoint.tokenizer.encode("abc12<|im_end|>") == [8, 9, 10, 2]


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q5_1])
def test_quantized_weights_are_near(tiny, tiny_gguf, kind):
    weights = read_gguf(tiny_gguf(kind=kind)).weights
    for name, values in tiny.weights.items():
        assert weights[name].dtype == np.float32
        bits = 4 if kind == TYPES.Q4_0 else 5 if kind == TYPES.Q5_1 else 7
        worst = np.abs(values).max() * 2.0**-bits * 2
        np.testing.assert_allclose(weights[name], values, atol=worst, err_msg=name)


def test_the_parser_agrees_with_the_gguf_package(tiny_gguf):
    path = tiny_gguf(change={"llama.numbers": [1, -2, 3], "llama.reals": [0.5, 2.0]})
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.kind, entry.offset) == (tensor.tensor_type, tensor.data_offset)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(ours.tensor(tensor.name), tensor.data)


def test_every_truncation_is_told(tiny_gguf, tmp_path):
    whole = tiny_gguf().read_bytes()
    start = min(entry.offset for entry in GGUFFile(tmp_path / "tiny.gguf").tensors.values())
    cuts = [4, 5, 8, 12, 24, *range(25, start, 997), start, start + 1, len(whole) // 2]
    for cut in [*cuts, len(whole) - 32]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut\.gguf: truncated: .* get it again"):
            read_gguf(path)


def test_foreign_files_are_told(tmp_path):
    path = tmp_path / "foreign.gguf"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model", "none")
    for content in (path.read_bytes(), b"Call me Ishmael.", b"", b"GG"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"foreign\.gguf: not a GGUF file"):
            read_gguf(path)
    path.write_bytes(b"GGUF" + b"\x00\x00\x00\x03" * 8)
    with pytest.raises(ValueError, match="GGUF version 50331648 is not supported"):
        read_gguf(path)
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "nowhere.gguf")


def test_random_damage_is_told_or_harmless(tiny_gguf, tmp_path):
    whole = tiny_gguf().read_bytes()
    start = min(entry.offset for entry in GGUFFile(tmp_path / "tiny.gguf").tensors.values())
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    for _ in range(150):
        damaged = bytearray(whole)
        for place in generator.integers(4, start, 3):
            damaged[place] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ValueError as error:
            assert "damaged.gguf" in str(error)  # noqa: PT017 (many damages are harmless)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; kvjax reads llama"),
        ({"llama.block_count": None}, "metadata llama.block_count is missing"),
        ({"llama.block_count": "two"}, "metadata llama.block_count is 'two', not a number"),
        ({"llama.block_count": 1}, r"weight layers\.1\..* has no place"),
        ({"llama.block_count": 3}, r"weight layers\.2\..* is missing"),
        ({"llama.attention.head_count": 0}, "metadata llama.attention.head_count is"),
        ({"llama.block_count": 2**31}, "metadata llama.block_count is 2147483648, the file has"),
        ({"llama.attention.head_count_kv": 3}, "must be a multiple of num_kv_heads=3"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "holds 3 values"),
        ({"llama.feed_forward_length": 65}, r"mlp\.down\.weight has shape \[32, 64\]"),
        ({"llama.attention.value_length": 4}, "metadata llama.attention.value_length is 4"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre is 'viking'"),
    ],
)
def test_wrong_metadata_is_named(tiny_gguf, change, fault):
    with pytest.raises(ValueError, match=rf"tiny\.gguf: .*{fault}"):
        build(read_gguf(tiny_gguf(change=change)))


def test_missing_tensors_are_named(tiny_gguf):
    with pytest.raises(ValueError, match=r"tiny\.gguf: weight norm\.weight \[32\] is missing"):
        build(read_gguf(tiny_gguf(without=["norm.weight"])))
    with pytest.raises(ValueError, match=r"tiny\.gguf: tensor token_embd\.weight .* is missing"):
        read_gguf(tiny_gguf(without=["embed.weight"]))


def test_weights_that_are_not_finite_are_named(tiny, tiny_gguf):
    bad = tiny.weights["layers.0.mlp.up.weight"].copy()
    bad[0, 0] = np.nan
    with pytest.raises(
        ValueError, match=r"tiny\.gguf: weight layers\.0\.mlp\.up\.weight holds NaN"
    ):
        build(read_gguf(tiny_gguf(weights={"layers.0.mlp.up.weight": bad})))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (24, "quantization type I8, which cannot be dequantized"),
        (31, "quantization type 31, which is not known"),
        (14, "needs a multiple of 256"),
    ],
)
def test_unreadable_quantization_types_are_named(tiny_gguf, kind, fault):
    path = tiny_gguf()
    data = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the rank and two dimensions
    path.write_bytes(data[:place] + bytes([kind]) + data[place + 1 :])
    with pytest.raises(
        ValueError, match=rf"tiny\.gguf: tensor blk\.0\.ffn_up\.weight has .*{fault}"
    ):
        read_gguf(path)


def test_unpermute_pairs_halves():
    rows = np.arange(12).reshape(12, 1)
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_names():
    assert weight_name("blk.12.post_ffw_norm.weight") == "layers.12.mlp_post_norm.weight"
    assert weight_name("blk.3.attn_q.bias") == "layers.3.attention.q.bias"
    assert weight_name("blk.3.ffn_gate_exps.weight") is None
    assert weight_name("v.patch_embd.weight") is None
