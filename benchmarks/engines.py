"""Runs one engine of the decode benchmark in a process of its own, and reads its answer."""

import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from benchmarks.peers.install import PEERS, python_of
from benchmarks.peers.measure import Request
from benchmarks.report import REPOSITORY

NAMES = {
    "kvjax": "kvjax",
    "transformers": "transformers",
    "llama_cpp": "llama.cpp",
    "vllm": "vLLM CPU",
    "openvino": "OpenVINO GenAI",
}
"""Engines by the name of their runner, with the name people know."""

START_S = 300.0
"""Seconds beyond its budget that an engine may take to start (vLLM compiles for minutes)."""

UNLIMITED_S = 3600.0
"""The budget of an engine that is to measure everything."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine with the dtype it is asked to compute in."""

    name: str
    dtype: str

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name in ("llama_cpp", "openvino"):  # they compute in the form of the file
            return NAMES[self.name]
        return f"{NAMES[self.name]} {'bf16' if self.dtype == 'bfloat16' else self.dtype}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an engine: its answer, or why there is none."""

    engine: Engine
    answer: dict[str, Any] | None
    why: str | None
    seconds: float

    def point(self, context: int, batch: int) -> dict[str, Any] | None:
        """The numbers of one context and batch, if they were measured."""
        for point in self.answer["points"] if self.answer else []:
            if (point["context"], point["batch"]) == (context, batch):
                return dict(point)
        return None

    def why_not(self, context: int, batch: int) -> str:
        """Why a point was not measured."""
        if self.why:
            return self.why
        for skip in self.answer["skipped"] if self.answer else []:
            if (skip["context"], skip["batch"]) == (context, batch):
                return str(skip["why"])
        return "not asked for"


def run(
    engine: Engine, request: Request, peers: pathlib.Path, say: Callable[[str], None]
) -> Outcome:
    """Measure with one engine.

    Args:
      engine: which.
      request: what to measure; its dtype is replaced by the engine's.
      peers: the folder that `benchmarks/peers/install.py` filled.
      say: called with what the engine is doing.
    """
    begin = time.monotonic()
    if engine.name == "kvjax":
        command = [sys.executable, "-m", "benchmarks.kvjax_engine"]
    else:
        python = python_of(peers.resolve(), engine.name)
        if not python.exists():
            why = f"not installed: python benchmarks/peers/install.py {peers} {engine.name}"
            return Outcome(engine, None, why, 0.0)
        script = REPOSITORY / "benchmarks" / "peers" / f"run_{engine.name}.py"
        command = [str(python), str(script)]
    # A budget is for peers: the run is about kvjax, so it measures everything it is asked for.
    budget_s = UNLIMITED_S if engine.name == "kvjax" else request.budget_s
    asked = dataclasses.asdict(dataclasses.replace(request, dtype=engine.dtype, budget_s=budget_s))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "request.json"
        file.write_text(json.dumps(asked))
        limit = budget_s + START_S
        answer, failure = converse([*command, str(file)], request.threads, limit, say)
    return Outcome(engine, answer, failure, time.monotonic() - begin)


def converse(
    command: list[str], threads: int, limit_s: float, say: Callable[[str], None]
) -> tuple[dict[str, Any] | None, str | None]:
    """Run a command that tells its progress on stderr and its answer on stdout.

    Args:
      command: as `benchmarks.peers.measure` has peers answer.
      threads: of the numeric libraries.
      limit_s: seconds until it is stopped.
      say: called with what it is doing.

    Returns:
      The answer, or None and why there is none.
    """
    threading_variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=REPOSITORY,
        env=os.environ | dict.fromkeys(threading_variables, str(threads)),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    lines: queue.Queue[tuple[str, str]] = queue.Queue()
    readers = [
        threading.Thread(target=_forward, args=(stream, name, lines), daemon=True)
        for name, stream in (("out", child.stdout), ("err", child.stderr))
    ]
    for reader in readers:
        reader.start()
    out, last, ended = "", "", 0
    deadline = time.monotonic() + limit_s
    try:
        while ended < len(readers):
            try:
                source, line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None, f"took longer than {limit_s:.0f} s, at: {last}"
            ended += source == "end"
            if source == "out":
                out += line
            elif line.startswith("@@ "):
                say(line[3:].strip())
            elif line.strip():
                last = line.strip()[-200:]
        status = child.wait()
    finally:
        child.kill()
        child.wait()
    if status:
        return None, f"ended with status {status}: {last}"
    return json.loads(out), None


def _forward(stream: IO[str], name: str, lines: queue.Queue[tuple[str, str]]) -> None:
    for line in stream:
        lines.put((name, line))
    lines.put(("end", ""))


def choose(names: list[str], bf16_is_fast: bool) -> list[Engine]:
    """The engines that names stand for; `NAME:DTYPE` insists on a dtype.

    Args:
      names: of `NAMES`; empty means all.
      bf16_is_fast: whether this processor multiplies bfloat16 without going through float32.

    Raises:
      ValueError: a name or dtype that is not known.
    """
    chosen: list[Engine] = []
    for text in names or list(NAMES):
        name, _, dtype = text.partition(":")
        dtype = {"bf16": "bfloat16"}.get(dtype, dtype)
        if name not in NAMES or dtype not in ("", "float32", "bfloat16"):
            raise ValueError(
                f"engine is {text!r}: must be one of {', '.join(NAMES)}, with :float32 or :bf16 or "
                "without"
            )
        if dtype or name != "kvjax":
            fast = "bfloat16" if name == "vllm" and bf16_is_fast else "float32"
            chosen.append(Engine(name, dtype or fast))
        else:
            chosen += [Engine(name, "float32"), Engine(name, "bfloat16")]
    return chosen


assert set(NAMES) == {"kvjax", *PEERS}
