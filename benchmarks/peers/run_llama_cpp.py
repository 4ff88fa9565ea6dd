"""llama.cpp through llama-cpp-python's low-level calls, run by its own Python (see measure.py)."""

import ctypes

import llama_cpp
import measure
import numpy as np

CHUNK = 512  # tokens of a prompt that one call computes


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop what the library would log."""


class LlamaCpp:
    """A loaded model and one context, made anew when the number of sequences changes."""

    copies_cache = True

    def __init__(self, request: measure.Request):
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(request.gguf.encode(), parameters)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {request.gguf}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.threads, self.steps = request.threads, request.steps
        self.most_rows = request.most_rows
        self.weights = "the file's own quantized weights"
        self.kv = "f16"
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.context = None
        self.room = 0
        self.position = 0
        self.newest: list[int] = []
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def make_context(self, tokens: int) -> None:
        """A context with room for every sequence to hold this many tokens."""
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = self.most_rows * -(-tokens // 256) * 256
        parameters.n_seq_max = self.most_rows
        parameters.n_batch = parameters.n_ubatch = CHUNK
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.kv_unified = False  # each sequence has cells of its own
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp gave no context of {parameters.n_ctx} tokens")
        self.room = tokens

    def decode(self, tokens: list[int], positions: list[int], rows: list[int], last: bool) -> None:
        """Compute one batch of tokens; logits for all of them, or only for the last."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row) in enumerate(zip(tokens, positions, rows, strict=True)):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = not last or i == len(tokens) - 1
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens gave status {status}")

    def greedy(self, index: int) -> int:
        """The likeliest token of one row of logits of the last batch."""
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocab_size,))))

    def prefill(self, prompt: list[int]) -> int:
        """Read one prompt in chunks into sequence 0."""
        needed = len(prompt) + 2 * self.steps + 8
        if needed > self.room:
            self.make_context(needed)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        for begin in range(0, len(prompt), CHUNK):
            tokens = prompt[begin : begin + CHUNK]
            positions = list(range(begin, begin + len(tokens)))
            self.decode(tokens, positions, [0] * len(tokens), last=True)
        self.position = len(prompt)
        self.newest = [self.greedy(-1)]
        return self.newest[0]

    def widen(self, prompts: list[list[int]]) -> None:
        """Copy sequence 0's cells to every other sequence."""
        memory = llama_cpp.llama_get_memory(self.context)
        for row in range(1, len(prompts)):
            llama_cpp.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self.newest *= len(prompts)

    def step(self) -> list[int]:
        """Decode one token for each sequence."""
        count = len(self.newest)
        self.decode(self.newest, [self.position] * count, list(range(count)), last=False)
        self.position += 1
        self.newest = [self.greedy(row) for row in range(count)]
        return self.newest


if __name__ == "__main__":
    measure.main(LlamaCpp)
