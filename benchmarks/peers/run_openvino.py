"""OpenVINO GenAI's paged, continuously batched pipeline, run by its own Python (see measure.py)."""

import measure
import numpy as np
import openvino
import openvino_genai

BLOCK = 32  # tokens of a cache block on CPU


class OpenVINO:
    """A continuous batching pipeline, driven step by step."""

    copies_cache = False  # it has no way to copy a sequence's blocks: every prompt is prefilled

    def __init__(self, request: measure.Request):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = request.most_rows * (request.most_tokens // BLOCK + 2)
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            request.gguf, scheduler, "CPU", {"INFERENCE_NUM_THREADS": request.threads}
        )
        self.weights = "the file's quantized weights, converted to its own int4 and int8"
        self.kv = "u8 (its default)"
        self.versions = {"openvino-genai": openvino_genai.__version__}
        self.steps = request.steps
        self.handles: list[openvino_genai.GenerationHandle] = []
        self.next_id = 0

    def add(self, prompt: list[int]) -> None:
        """Queue one prompt; it asks for more tokens than will be taken, and never stops early."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = 2 * self.steps + 16
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self.handles.append(self.pipeline.add_request(self.next_id, ids, config))
        self.next_id += 1

    def clear(self) -> None:
        """Drop the sequences under way."""
        for handle in self.handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles = []

    def advance(self) -> list[int | None]:
        """One step of the pipeline; the newest token of each sequence that got one."""
        self.pipeline.step()
        newest: list[int | None] = []
        for handle in self.handles:
            newest.append(None)
            while handle.can_read():
                for output in handle.read().values():
                    newest[-1] = output.generated_ids[-1]
        return newest

    def prefill(self, prompt: list[int]) -> int:
        """Read one prompt in chunks until it gives its first token."""
        self.clear()
        self.add(prompt)
        while (token := self.advance()[0]) is None:
            pass
        return token

    def widen(self, prompts: list[list[int]]) -> None:
        """Prefill every prompt, until all of them are decoding."""
        self.clear()
        for prompt in prompts:
            self.add(prompt)
        waiting = set(range(len(prompts)))
        while waiting:
            waiting -= {row for row, token in enumerate(self.advance()) if token is not None}

    def step(self) -> list[int]:
        """Decode one token for each sequence."""
        tokens = self.advance()
        if None in tokens:
            raise RuntimeError(f"a decode step of {len(tokens)} sequences gave {tokens}")
        return [token for token in tokens if token is not None]


if __name__ == "__main__":
    measure.main(OpenVINO)
