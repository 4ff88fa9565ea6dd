"""Chat templates: a checkpoint's own Jinja program, run where it can do no harm."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

Message = Mapping[str, Any]
"""A turn: at least "role" (system, user, assistant, tool) and "content"."""


_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template's own expressions raise when they meet values they were not written for."""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    # A template comes with a downloaded file: sandboxed, it reaches no Python internals and
    # changes none of its arguments.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def render(template: str, messages: Sequence[Message], **variables: Any) -> str:
    """The text a chat template makes of a conversation.

    Args:
        template: Jinja source, as tokenizer_config.json and GGUF files carry it.
        messages: the turns so far, oldest first.
        **variables: what else the template may name (add_generation_prompt, bos_token, tools...).

    Raises:
        ValueError: a message lacks its role, or the template refuses the conversation or fails.
    """
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one turn")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{index}] is {message!r}; a turn looks like "
                "{'role': 'user', 'content': 'Hello'}"
            )
    try:
        return _compiled(template).render(messages=list(messages), **variables)
    except (jinja2.TemplateError, *_FAILURES) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
