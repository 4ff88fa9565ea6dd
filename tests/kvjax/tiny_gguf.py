"""A whole model in one small GGUF file, written by the `gguf` package."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, WIDE = 64, 96
PIECES = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"]
VOCABULARY = len(PIECES)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"
)


def write_gguf(path, *, quantized=True, architecture="llama", nan=False, chat=True):
    """A whole Llama of two layers with seeded weights and a byte-level tokenizer, 200 kB."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3] + [1] * (VOCABULARY - 1))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns)).astype(np.float32) * 0.1
        if nan and name == "blk.1.ffn_up.weight":
            values[3, 5] = np.nan
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and not nan else None
        stored = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(2):
        for name, rows, columns in [
            ("attn_q", 64, HIDDEN), ("attn_k", 32, HIDDEN), ("attn_v", 32, HIDDEN),
            ("attn_output", HIDDEN, 64),
            ("ffn_gate", WIDE, HIDDEN), ("ffn_up", WIDE, HIDDEN), ("ffn_down", HIDDEN, WIDE),
        ]:  # fmt: skip
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
