"""What every peer's runner shares: the request, the clock, and the one JSON object it prints.

A runner is executed by its peer's own Python as `run_<peer>.py REQUEST.json`, so this file imports
nothing but the standard library. It gives `main` a function that starts its engine; `main` prefills
each prompt, takes decode steps at that context, and prints the answer. All that libraries print
goes to stderr; lines there that begin with `@@ ` are progress.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

SLOW_PREFILL_S = 10.0  # a prefill that takes longer is timed once, not `repeats` times


@dataclasses.dataclass(frozen=True)
class Request:
    """What the parent asks for."""

    gguf: str  # the model file that every engine reads
    prompts: dict[str, list[list[int]]]  # context -> one list of token ids a sequence
    batches: dict[str, list[int]]  # context -> how many sequences are decoded together
    steps: int  # decode steps timed at each context
    repeats: int  # of a prefill
    threads: int
    dtype: str  # of the engine's weights and cache, where it can be chosen
    budget_s: float  # after the start; points that would not fit are skipped, and said so
    cache_dir: str  # for what an engine derives from the file (exports, compiled graphs)
    max_context: int  # tokens that the model can see
    cache_bytes: int  # of keys and values in `dtype`, for the largest point
    quick: bool  # leave out what is not needed for times and tokens

    @property
    def most_rows(self) -> int:
        """The largest batch."""
        return max(max(batches) for batches in self.batches.values())

    @property
    def most_tokens(self) -> int:
        """Tokens that the longest sequence may come to hold: timed steps and untimed ones."""
        return max(int(context) for context in self.prompts) + 2 * self.steps + 8


class Engine(Protocol):
    """One inference engine with its model loaded.

    It may also have `prepare(prompt)`, untimed work before a prompt of that length;
    `time_steps(count)`, which returns what `time_each_step` does; and `facts(context, batch)`,
    more to say of a point.
    """

    weights: str  # the form in which it holds the weights
    kv: str  # the form in which it holds keys and values
    versions: dict[str, str]
    copies_cache: bool  # whether `widen` copies or fills a cache, or else prefills every prompt

    def prefill(self, prompt: list[int]) -> int:
        """Forget everything, read one prompt, return the greedy next token."""
        ...

    def widen(self, prompts: list[list[int]]) -> None:
        """Go from one sequence to as many as there are prompts, of the same context."""
        ...

    def step(self) -> list[int]:
        """Decode one token for each sequence, greedily; return them."""
        ...


def progress(text: str) -> None:
    """Tell the parent what is being done."""
    print(f"@@ {text}", file=sys.stderr, flush=True)


def time_each_step(engine: Engine, count: int) -> tuple[list[float], list[int]]:
    """Seconds of each of `count` steps after an untimed one, and the first sequence's tokens."""
    tokens = [engine.step()[0]]
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        chosen = engine.step()
        seconds.append(time.perf_counter() - begin)
        tokens.append(chosen[0])
    return seconds, tokens


def decode_point(engine: Engine, context: int, batch: int, count: int) -> dict[str, Any]:
    """The numbers of one context and batch."""
    timer = getattr(engine, "time_steps", None)
    seconds, tokens = timer(count) if timer else time_each_step(engine, count)
    step_s = statistics.median(seconds)
    facts = getattr(engine, "facts", None)
    return (facts(context, batch) if facts else {}) | {
        "context": context,
        "batch": batch,
        "step_ms": 1e3 * step_s,
        "decode_tokens_per_s": batch / step_s,
        "steps": count,
        "greedy": tokens,
    }


def measure(request: Request, engine: Engine) -> dict[str, Any]:
    """Prefill and decode at every context and batch that fits into the budget."""
    points: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    shortest = min(request.prompts.values(), key=lambda prompts: len(prompts[0]))[0]
    progress("warming up")
    engine.prefill(shortest)
    engine.step()
    deadline = time.monotonic() + request.budget_s
    seconds_per_token = 0.0
    for name, prompts in sorted(request.prompts.items(), key=lambda item: int(item[0])):
        context = int(name)
        left = deadline - time.monotonic()
        if points and seconds_per_token * context > left:
            why = f"a prefill would take about {seconds_per_token * context:.0f} s, {left:.0f} left"
            skipped += [{"context": context, "batch": b, "why": why} for b in request.batches[name]]
            continue
        if prepare := getattr(engine, "prepare", None):
            progress(f"compiling for {context} tokens")
            prepare(prompts[0])
        prefills: list[float] = []
        while len(prefills) < request.repeats and (not prefills or prefills[0] < SLOW_PREFILL_S):
            progress(f"prefill of {context} tokens, run {len(prefills) + 1}")
            begin = time.perf_counter()
            first = engine.prefill(prompts[0])
            prefills.append(time.perf_counter() - begin)
        prefill_s = statistics.median(prefills)
        seconds_per_token = prefill_s / context
        for batch in request.batches[name]:
            left = deadline - time.monotonic()
            if batch > 1 and not engine.copies_cache and batch * prefill_s > left:
                why = f"{batch} prefills would take {batch * prefill_s:.0f} s, {left:.0f} left"
                skipped.append({"context": context, "batch": batch, "why": why})
                continue
            progress(f"decode at {context} tokens, batch {batch}")
            if batch > 1:
                engine.widen([prompts[row % len(prompts)] for row in range(batch)])
            points.append(decode_point(engine, context, batch, request.steps))
            if batch == 1:
                points[-1] |= {
                    "prefill_tokens_per_s": context / prefill_s,
                    "prefill_runs": len(prefills),
                    "greedy": [first, *points[-1]["greedy"]],
                }
    return {"points": points, "skipped": skipped}


def main(start: Callable[[Request], Engine]) -> None:
    """Run a decode request with an engine."""

    def run(asked: dict[str, Any]) -> dict[str, Any]:
        request = Request(**asked)
        begin = time.monotonic()
        progress("starting")
        engine = start(request)
        start_s = time.monotonic() - begin
        return measure(request, engine) | {
            "weights": engine.weights,
            "kv": engine.kv,
            "versions": engine.versions,
            "threads": request.threads,
            "start_s": start_s,
        }

    answer(run)


def answer(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the request that the command line names, run it, print one JSON object on stdout."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print to stdout must not spoil the answer
    sys.stdout = sys.stderr
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    answer_to.write(json.dumps(run(asked)) + "\n")
    answer_to.flush()
    os._exit(0)  # some engines hang or crash while Python takes them down
