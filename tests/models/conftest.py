"""A tiny Llama as a GGUF file, written as llama.cpp's converter writes it."""

import gguf
import numpy as np
import pytest

from kvjax.models import LayerConfig, ModelConfig, random_checkpoint

PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "Ġ", "ab", "abc", "1", "2"]
TINY = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=(LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8),) * 2,
    max_context=128,
    norm_eps=1e-5,
    tie_embeddings=True,
)
NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def permuted(rows, heads):
    """Rows in the converter's order: a head's two halves interleaved."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name):
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]


def write_gguf(path, weights, *, change=None, tokenizer=True, kind=None, without=()):
    """Writes weights of TINY; `change` maps metadata keys to other values or None (left out)."""
    change = change or {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.data_alignment = 32
    fields = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"} if tokenizer else {}),
        **change,
    }
    if "general.architecture" in fields:
        writer.kv_data[0].pop("general.architecture")
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if tokenizer:
        pieces = PIECES + [f"[PAD{i}]" for i in range(64 - len(PIECES))]
        writer.add_token_list(pieces)
        writer.add_token_types([3] * 3 + [1] * 61)
        writer.add_token_merges(["a b", "ab c"])
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
    for name, values in weights.items():
        if name in without:
            continue
        for part, heads in (("attention.q.", 4), ("attention.k.", 2)):
            if part in name:
                values = permuted(values, heads)
        raw_dtype = None
        if kind is not None and values.ndim == 2:
            values, raw_dtype = gguf.quants.quantize(values, kind), kind
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny():
    """Random weights of TINY."""
    return random_checkpoint(TINY, seed=3)


@pytest.fixture
def tiny_gguf(tmp_path, tiny):
    """A function that writes them, changed in some way, and returns the file."""

    def write(**how):
        weights = {**tiny.weights, **how.pop("weights", {})}
        return write_gguf(tmp_path / "tiny.gguf", weights, **how)

    return write
