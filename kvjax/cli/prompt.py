"""Where a command's text comes from: an argument, a file, standard input, or several of them."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import note
from kvjax.errors import KvjaxError, as_kvjax_error
from kvjax.model import Model

FromFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Read a UTF-8 text; a text given as an argument follows it."),
]
FromStdin = Annotated[
    bool, typer.Option("--stdin", help="Read standard input, after --file, before an argument.")
]


MOST_BYTES = 64 << 20
"""Of one file or of standard input: more than any context holds, and little enough to read."""


_FILE_NAME = re.compile(r"\S*\.(txt|md|rst|json|html?|tex|py|csv|log)", re.IGNORECASE)
"""What is more likely a file's name than a text."""


def gather(argument: str | None, file: Path | None, stdin: bool) -> str:
    """The text: file, standard input and argument in this order, a blank line between them.

    Raises:
      KvjaxError: none was given, or what was given is empty or not UTF-8.
    """
    parts = []
    if file is not None:
        parts.append(read_text(file))
    if stdin:
        if sys.stdin is None:
            raise KvjaxError("standard input is closed: there is nothing to read")
        parts.append(_decode(sys.stdin.buffer.read(MOST_BYTES + 1), "standard input"))
    if argument is not None:
        parts.append(argument)
    if not parts:
        raise KvjaxError("no text: give it as an argument, with --file FILE, or with --stdin")
    if argument is not None and len(parts) == 1 and _FILE_NAME.fullmatch(argument):
        note(f"the text is {argument!r} itself; a file of that name is read with --file {argument}")
    text = parts[0] if len(parts) == 1 else "\n\n".join(part.strip() for part in parts)
    if not text.strip():
        raise KvjaxError("the text is empty: there is nothing to read")
    return text


def read_text(path: Path) -> str:
    """A UTF-8 text file.

    Raises:
      KvjaxError: it is not UTF-8, or has more than `MOST_BYTES`.
      OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return _decode(file.read(MOST_BYTES + 1), str(path))


def _decode(content: bytes, where: str) -> str:
    if len(content) > MOST_BYTES:
        raise KvjaxError(
            f"{where} has more than {MOST_BYTES >> 20} MiB: no model's context holds so long a text"
        )
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise KvjaxError(
            f"{where} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
        ) from error


def read_tokens(path: Path) -> list[int]:
    """Token ids from a JSON file.

    Raises:
      KvjaxError: it is not a list of integers.
      OSError: it cannot be read.
    """
    try:
        ids = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise KvjaxError(f"{path} is not JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise KvjaxError(f"{path} must hold a JSON list of token ids, such as [504, 3575, 282]")
    return ids


def as_chat(model: Model, text: str, system: str | None) -> str:
    """The text as a conversation's first turn, in the model's own chat template.

    Raises:
      KvjaxError: the model has none, or it refuses the turns.
    """
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise KvjaxError(
            f"{model.name} has no chat template (it is a base model): leave out --chat"
        )
    messages = [{"role": "system", "content": system}] if system is not None else []
    with as_kvjax_error():
        return model.tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])


def around_chat(model: Model, system: str | None) -> tuple[str, str]:
    """What the chat template puts before and after the text of a conversation's first turn.

    Raises:
      KvjaxError: the model has no template.
    """
    marker = "\N{OBJECT REPLACEMENT CHARACTER}"
    before, _, after = as_chat(model, marker, system).partition(marker)
    return before, after


def stop_ids(model: Model, stops: list[str]) -> list[int]:
    """Token ids of --stop options: each is one token's text, or its id.

    Raises:
      KvjaxError: a text is not exactly one token.
    """
    ids = []
    for stop in stops:
        if stop.isdecimal():
            ids.append(int(stop))
            continue
        if model.tokenizer is None:
            raise KvjaxError(f"{model.name} has no tokenizer: give --stop a token id, not {stop!r}")
        with as_kvjax_error():
            found = model.tokenizer.encode(stop, add_bos=False)
        if len(found) != 1:
            raise KvjaxError(
                f"--stop {stop!r} is {len(found)} tokens ({found}): give one token's text or id"
            )
        ids += found
    return ids
