"""Writes tests/models/data: tiny random models and their logits as transformers computes them.

Needs torch and transformers, which the tests themselves do not; run it by hand:

    python tests/models/make_references.py

Every model is stored in bfloat16 and computed in float32 with eager attention.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers as hf

DATA = pathlib.Path(__file__).resolve().parent / "data"
TOKENS = 48
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.8}
GEMMA = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DEEPSEEK = {
    **TINY,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": hf.LlamaConfig(**TINY),
    "llama3_rope": hf.LlamaConfig(**TINY, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": hf.MistralConfig(**TINY, sliding_window=7, head_dim=16),
    "qwen2": hf.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_theta=1e6
    ),
    "qwen2_yarn": hf.Qwen2Config(**TINY, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**TINY, head_dim=16, rope_theta=1e6),
    "gemma3": hf.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 7},
        sliding_window=6,
        query_pre_attn_scalar=24,
        rope_parameters=GEMMA_ROPE,
        final_logit_softcapping=9.0,
    ),
    "deepseek_v2": hf.DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=4.0,
    ),
    "deepseek_v2_lite": hf.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, rope_parameters={**YARN, **MSCALE}
    ),
    "deepseek_v3": hf.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=24, n_group=4, topk_group=2, rope_parameters={**YARN, **MSCALES}
    ),
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
CONFIGS["deepseek_v32"] = hf.DeepseekV32Config(
    **{**DEEPSEEK, **INDEXER},
    q_lora_rank=24,
    n_group=4,
    topk_group=2,
    rope_parameters={**YARN, **MSCALES},
)
CONFIGS["glm_moe_dsa"] = hf.GlmMoeDsaConfig(
    **{**DEEPSEEK, **INDEXER, "num_hidden_layers": 4},
    q_lora_rank=24,
    indexer_types=["full", "shared", "full", "shared"],
)
SHARDED = ("qwen3",)


def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, value) for name, value in model.named_buffers() if name.endswith("bias")]
    for name, value in [*model.named_parameters(), *biases]:
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight") or "layernorm" in name:
            value.data = value.data + 0.2 * noise
        elif name.endswith("bias"):
            value.data = 0.5 * noise
        else:
            value.data = noise * (2.0 if "embed" in name else 1.5) * value.shape[-1] ** -0.5
        # Not model.to(bfloat16): that would round the rotary frequencies, too.
        value.data = value.data.to(torch.bfloat16).to(torch.float32)


def main():
    for seed, (name, config) in enumerate(CONFIGS.items()):
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        config._attn_implementation = config._experts_implementation = "eager"
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, None
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config).eval()
        randomize(model, seed)
        tokens = np.random.default_rng(seed).integers(0, TINY["vocab_size"], TOKENS)
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None]).logits[0].numpy()
        shard = "40KB" if name in SHARDED else "1GB"
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=logits)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: {size / 1e3:.0f} kB, logits within {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    main()
