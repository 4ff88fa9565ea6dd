"""What runners of quantized caches share: a document, forced questions, KL to the exact cache.

A runner is executed by its peer's own Python as `quantized_<peer>.py REQUEST.json`, so this file
imports nothing but NumPy and the standard library. Every kind of cache is judged against the same
engine's exact one, so that engines that compute differently are not compared by that.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import measure
import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """What the parent asks for."""

    gguf: str
    document: list[int]
    questions: list[list[int]]
    answer: int  # greedy tokens after each question
    threads: int
    cache_dir: str  # for what an engine derives from the file


class Engine(Protocol):
    """One engine with its model loaded."""

    kinds: tuple[str, ...]  # of caches; the first is exact
    versions: dict[str, str]

    def read(self, kind: str, document: list[int]) -> float:
        """Read a document into an empty cache; the bytes that the cache takes a token."""
        ...

    def ask(self, question: list[int], count: int) -> tuple[np.ndarray, list[int]]:
        """Logits [n, V] at a question's tokens after the document, and a greedy answer."""
        ...


def run(request: Request, engine: Engine) -> dict[str, Any]:
    """Ask every question through every kind of cache."""
    exact: list[np.ndarray] = []
    points = []
    for kind in engine.kinds:
        measure.progress(f"{kind}: reading")
        token_bytes = engine.read(kind, request.document)
        kl, same, answers = [], [], []
        for index, question in enumerate(request.questions):
            measure.progress(f"{kind}: question {index + 1} of {len(request.questions)}")
            logits, answer = engine.ask(question, request.answer)
            logprobs = log_softmax(logits)
            if kind == engine.kinds[0]:
                exact.append(logprobs)
            mine = exact[index]
            kl += (np.exp(mine) * (mine - logprobs)).sum(-1).tolist()
            same += (mine.argmax(-1) == logprobs.argmax(-1)).tolist()
            answers.append(answer)
        points.append(
            {
                "kind": kind,
                "bytes_per_token": token_bytes,
                "kl": float(np.mean(kl)),
                "agrees": float(np.mean(same)),
                "answers": answers,
            }
        )
    return {"points": points, "versions": engine.versions}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main(start: Callable[[Request], Engine]) -> None:
    """Run a request with an engine."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        request = Request(**asked)
        measure.progress("starting")
        return run(request, start(request))

    measure.answer(answer)
