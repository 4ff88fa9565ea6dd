"""Small files of what was measured: JSON with a name, a version and a checksum, whole or not."""

import hashlib
import json
import os
import pathlib
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.storage.files import publish


def write_sealed(
    path: str | os.PathLike[str], body: dict[str, Any], *, magic: str, version: int
) -> None:
    """Write a file, whole or not at all; an older file of that name is replaced.

    Args:
      path: of the file.
      body: what JSON can hold.
      magic: what the file says it is.
      version: of the body's fields.

    Raises:
      OSError: it cannot be written.
    """
    head = {"magic": magic, "version": version, "sha256": digest(body)}
    with publish(path) as unfinished:
        unfinished.write_text(json.dumps(head | {"body": body}) + "\n", encoding="utf-8")


def read_sealed(
    path: str | os.PathLike[str], *, what: str, magic: str, version: int, again: str
) -> dict[str, Any]:
    """The body of a file that `write_sealed` wrote.

    Args:
      path: of the file.
      what: its kind in words, which begins every refusal.
      magic: as it was written.
      version: the one that is read.
      again: how to get a new one, which ends the refusals.

    Raises:
      KvjaxError: there is no such file, it is something else, of another version or damaged.
      OSError: it cannot be read.
    """
    name = f"{what} {os.fspath(path)}"
    try:
        data = pathlib.Path(path).read_bytes()
    except FileNotFoundError as error:
        raise KvjaxError(f"{name} does not exist: give the path that it was saved to") from error
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KvjaxError(f"{name} is torn (no JSON: {error}): {again}") from error
    if not isinstance(parsed, dict) or parsed.get("magic") != magic:
        raise KvjaxError(f"{name} is something else: it does not say {magic!r}")
    if parsed.get("version") != version:
        raise KvjaxError(
            f"{name} has version {parsed.get('version')!r}, and this program reads {version}: "
            f"{again}"
        )
    body = parsed.get("body")
    if not isinstance(body, dict) or parsed.get("sha256") != digest(body):
        raise KvjaxError(f"{name} is damaged, it is not what was written: {again}")
    return body


def digest(body: dict[str, Any]) -> str:
    """The SHA-256 of a body, in hex, whatever the order of its fields."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
