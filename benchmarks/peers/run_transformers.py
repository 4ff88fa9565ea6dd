"""Hugging Face transformers with its DynamicCache, run by its own Python (see measure.py)."""

import export_hf
import measure
import torch
import transformers


class Transformers:
    """A causal language model and the cache of the sequences under way."""

    copies_cache = True

    def __init__(self, request: measure.Request):
        torch.set_num_threads(request.threads)
        folder = export_hf.export(request.gguf, request.dtype, request.cache_dir)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, request.dtype)
        ).eval()
        self.weights = f"{request.dtype}, dequantized from the file"
        self.kv = f"{request.dtype}, DynamicCache"
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.cache = transformers.DynamicCache()
        self.newest = torch.zeros((1, 1), dtype=torch.long)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor) -> None:
        """Run the model over new tokens and keep the greedy next one of each sequence."""
        answer = self.model(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.newest = answer.logits[:, -1:].argmax(dim=-1)

    def prefill(self, prompt: list[int]) -> int:
        """Read one prompt into an empty cache."""
        self.cache = transformers.DynamicCache()
        self.forward(torch.tensor([prompt]))
        return int(self.newest[0, 0])

    def widen(self, prompts: list[list[int]]) -> None:
        """Copy the one sequence's keys and values to every row of the batch."""
        self.cache.batch_repeat_interleave(len(prompts))
        self.newest = self.newest.repeat(len(prompts), 1)

    def step(self) -> list[int]:
        """Decode one token for each sequence."""
        self.forward(self.newest)
        return [int(token) for token in self.newest[:, 0]]


if __name__ == "__main__":
    measure.main(Transformers)
