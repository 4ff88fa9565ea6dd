"""llama.cpp with its quantized caches, run by its own Python (see quantized.py)."""

import ctypes
import os
import pathlib

import llama_cpp
import numpy as np
import quantized
from run_llama_cpp import CHUNK, quiet

TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}


def dequantized(gguf: str, folder: str, threads: int) -> bytes:
    """The same file with float32 weights, made once.

    With quantized weights llama.cpp also rounds what they are multiplied by, which would turn small
    differences of the caches into larger ones.
    """
    source = pathlib.Path(gguf)
    facts = source.stat()
    target = pathlib.Path(folder) / f"{source.stem}-f32-{facts.st_size}-{int(facts.st_mtime)}.gguf"
    if not target.is_file():
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
        parameters.allow_requantize = True
        parameters.nthread = threads
        status = llama_cpp.llama_model_quantize(
            gguf.encode(), str(partial).encode(), ctypes.byref(parameters)
        )
        if status:
            raise ValueError(f"llama.cpp cannot dequantize {gguf}: status {status}")
        partial.rename(target)
    return str(target).encode()


class LlamaCpp:
    """A loaded model and one context, made anew for each kind of cache."""

    kinds = tuple(TYPES)

    def __init__(self, request: quantized.Request):
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = dequantized(request.gguf, request.cache_dir, request.threads)
        self.model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {request.gguf}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.threads = request.threads
        longest = max(map(len, request.questions))
        self.room = len(request.document) + longest + request.answer
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.context = None
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def read(self, kind: str, document: list[int]) -> float:
        """Read a document; bytes of the stored cells, as the library would save them."""
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = -(-self.room // 256) * 256
        parameters.n_batch = parameters.n_ubatch = CHUNK
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = TYPES[kind]
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp gave no context with a {kind} cache")
        self.length = len(document)
        for begin in range(0, len(document), CHUNK):
            self.decode(document[begin : begin + CHUNK], begin)
        return llama_cpp.llama_state_seq_get_size(self.context, 0) / len(document)

    def decode(self, tokens: list[int], begin: int) -> np.ndarray:
        """Compute tokens at positions from `begin` on; logits [n, V], of the last 64 at most."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        wanted = range(max(0, len(tokens) - 64), len(tokens))
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = begin + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i in wanted
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens gave status {status}")
        rows = [llama_cpp.llama_get_logits_ith(self.context, i) for i in wanted]
        return np.stack([np.ctypeslib.as_array(row, shape=(self.vocab_size,)) for row in rows])

    def ask(self, question: list[int], count: int) -> tuple[np.ndarray, list[int]]:
        """Put a question after the document, in place of the one before."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_seq_rm(memory, 0, self.length, -1)
        asked = logits = self.decode(question, self.length)
        answer: list[int] = []
        for index in range(count):
            answer.append(int(logits[-1].argmax()))
            logits = self.decode(answer[-1:], self.length + len(question) + index)
        return asked, answer


if __name__ == "__main__":
    quantized.main(LlamaCpp)
