"""Quantized caches of peers, each in a process of its own (see `peers/quantized.py`)."""

import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.engines import NAMES, converse
from benchmarks.peers.install import python_of
from benchmarks.report import REPOSITORY

PEERS = {name: NAMES[name] for name in ("llama_cpp", "transformers")}
"""Peers with a runner for quantized caches, with the name people know."""

LIMIT_S = 1800.0
"""Seconds until a peer is stopped."""


def peer_points(
    name: str, request: dict[str, Any], peers: pathlib.Path, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], str | None]:
    """Ask a peer's questions through every kind of its caches.

    Args:
      name: of `PEERS`.
      request: the fields of `peers/quantized.py`'s request.
      peers: the folder that `benchmarks/peers/install.py` filled.
      say: told what goes on.

    Returns:
      What each kind did, the exact one first; or nothing, and why.
    """
    python = python_of(peers.resolve(), name)
    if not python.exists():
        return [], f"not installed: python benchmarks/peers/install.py {peers} {name}"
    script = REPOSITORY / "benchmarks" / "peers" / f"quantized_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        command = [str(python), str(script), str(file)]
        answer, why = converse(
            command, request["threads"], LIMIT_S, lambda text: say(f"{PEERS[name]}: {text}")
        )
    return (answer["points"] if answer else []), why
