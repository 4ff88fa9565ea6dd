"""Hugging Face transformers with its QuantizedCache, run by its own Python (see quantized.py)."""

import copy
from typing import Any

import export_hf
import numpy as np
import quantized
import torch
import transformers

CACHES: dict[str, dict[str, Any]] = {
    "float32": {},
    "QuantizedCache, 8 bits (fp8)": {"backend": "fp8"},
    "QuantizedCache, 4 bits": {"backend": "quanto", "nbits": 4},
    "QuantizedCache, 4 bits, keys by channel": {"backend": "quanto", "nbits": 4, "axis_key": -1},
    "QuantizedCache, 2 bits": {"backend": "quanto", "nbits": 2},
    "QuantizedCache, 2 bits, keys by channel": {"backend": "quanto", "nbits": 2, "axis_key": -1},
}
"""Kinds of caches by name; all have the library's group of 64 and residual of 128 tokens."""


class Transformers:
    """A causal language model, and the cache of the document."""

    kinds = tuple(CACHES)

    def __init__(self, request: quantized.Request):
        torch.set_num_threads(request.threads)
        folder = export_hf.export(request.gguf, "float32", request.cache_dir)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def read(self, kind: str, document: list[int]) -> float:
        """Read a document in one call, whose attention sees it exact, as the library does."""
        options = CACHES[kind]
        self.cache = (
            transformers.QuantizedCache(config=self.model.config, **options)
            if options
            else transformers.DynamicCache()
        )
        self.forward(self.cache, document)
        stored = [
            part
            for layer in self.cache.layers
            for part in (
                (layer._quantized_keys, layer._quantized_values)
                if options
                else (layer.keys, layer.values)
            )
        ]
        return sum(map(nbytes, stored)) / len(document)

    @torch.inference_mode()
    def forward(self, cache: Any, tokens: list[int], keep: int = 1) -> np.ndarray:
        """Compute new tokens; logits [keep, V] of the last of them."""
        answer = self.model(
            input_ids=torch.tensor([tokens]),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return np.asarray(answer.logits[0].float())

    def ask(self, question: list[int], count: int) -> tuple[np.ndarray, list[int]]:
        """Put a question after the document's cache, whose layers replace what they update."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        asked = logits = self.forward(cache, question, len(question))
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(logits[-1].argmax()))
            logits = self.forward(cache, answer[-1:])
        return asked, answer


def nbytes(stored: Any) -> int:
    """Bytes of what a layer stores, scales counted as the 16 bits they have in a bf16 model."""
    if isinstance(stored, tuple):  # float8 codes and a scale of the whole tensor
        return int(stored[0].nbytes)
    if hasattr(stored, "_scale"):
        packed = stored._data
        codes = getattr(packed, "_data", packed)
        return int(codes.nbytes + 2 * (stored._scale.numel() + stored._shift.numel()))
    return int(2 * stored.numel())


if __name__ == "__main__":
    quantized.main(Transformers)
