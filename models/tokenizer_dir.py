"""The tokenizer in a folder of Hugging Face files."""

import json
import pathlib
from typing import Any

import tokenizers

from kvjax.models.tokenizer import Tokenizer, read_backend


def read_tokenizer(folder: str | pathlib.Path) -> Tokenizer | None:
    """Reads tokenizer.json and what the files beside it say of special tokens and chats.

    Returns:
        None if the folder has no tokenizer.json.

    Raises:
        ValueError: a file is damaged, or names a token the vocabulary does not have.
    """
    folder = pathlib.Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    backend = read_backend(path.read_text(encoding="utf-8", errors="replace"), str(path))
    settings = _optional(folder / "tokenizer_config.json")
    bos_id = _named(backend, settings.get("bos_token"), folder)
    eos_id = _named(backend, settings.get("eos_token"), folder)
    ends = {eos_id} if eos_id is not None else set()
    for file in ("config.json", "generation_config.json"):
        listed = _optional(folder / file).get("eos_token_id")
        ends |= {token for token in _as_list(listed) if isinstance(token, int)}
    add_bos = settings.get("add_bos_token")
    if add_bos is None:  # then the tokenizer's own post-processor says
        add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return Tokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_ids=frozenset(ends),
        add_bos=bool(add_bos),
        chat_template=_chat_template(folder, settings),
        eos_id=eos_id,
    )


def _optional(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    return fields if isinstance(fields, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _named(backend: tokenizers.Tokenizer, token: Any, folder: pathlib.Path) -> int | None:
    """The id of a special token, written as text or as an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    index = backend.token_to_id(str(token))
    if index is None:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: token {token!r} is not in tokenizer.json"
        )
    return int(index)


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
