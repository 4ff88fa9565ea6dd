"""Text to token ids and back, also one token at a time."""

import codecs
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from kvjax.models import chat


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, as byte-level vocabularies spell them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the merges, normalisation and added tokens.
        bos_id: the token that starts a text, if the model has one.
        eos_ids: the tokens that end a text or a turn.
        eos_id: the one of them that chat templates mean by `eos_token`.
        add_bos: whether `encode` starts with `bos_id` unless told otherwise.
        chat_template: Jinja source; None for a model that was not trained to chat.

    Raises:
        ValueError: the backend spells bytes in a way not known here.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None
    eos_id: int | None = None

    def __post_init__(self) -> None:
        _ = self._spelling

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids.

        Args:
            text: any string without lone surrogates.
            add_bos: put `bos_id` first (once); None: as the model wants it.

        Raises:
            ValueError: the text cannot be written in UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds {text[error.start]!r} at index {error.start}, which is not a "
                "character: decode the source as UTF-8 with errors='replace'"
            ) from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that make no character become U+FFFD.

        Args:
            ids: tokens of the vocabulary.
            skip_special: leave out control tokens such as end-of-turn.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([*map(stream.step, ids), stream.finish()])

    def apply_chat_template(
        self,
        messages: Sequence[chat.Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text this model expects for a conversation.

        Args:
            messages: turns as {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: end with the opening of the assistant's next turn.
            **variables: what else the template understands, such as `tools`.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template (it is a base model): give it plain text instead"
            )
        tokens = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        named = {
            name: "" if token is None else self.backend.id_to_token(token)
            for name, token in tokens.items()
        }
        return chat.render(
            self.chat_template,
            messages,
            **{"add_generation_prompt": add_generation_prompt, **named, **variables},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON can hold them."""
        return {
            "backend": self.backend.to_str(),
            "bos_id": self.bos_id,
            "eos_ids": sorted(self.eos_ids),
            "add_bos": self.add_bos,
            "chat_template": self.chat_template,
            "eos_id": self.eos_id,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Tokenizer":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        try:
            backend = read_backend(fields["backend"], "stored backend")
            return cls(**{**fields, "backend": backend, "eos_ids": frozenset(fields["eos_ids"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a stored Tokenizer: {error}") from error

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for; they may end within a character.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        piece = self.backend.id_to_token(token) if token >= 0 else None
        if piece is None:
            raise ValueError(f"token id {token} is not in the vocabulary of {self.vocab_size}")
        if self._spelling[0]:
            # Added tokens are plain text, whatever their characters.
            if token not in self._added and all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            return str(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("▁", " ").encode()

    @functools.cached_property
    def longest_token(self) -> int:
        """The characters of the longest token: a text of n has at least n over this many tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first piece starts with a space that `encode` put there."""
        return self._spelling[1]

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token rather than text."""
        return token in self._special

    @functools.cached_property
    def _spelling(self) -> tuple[bool, bool]:
        """Whether pieces spell bytes (or else words), and whether a text's first space is extra."""
        decoder = self.backend.decoder
        root = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = root.get("decoders", [root])
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds:
            return True, False
        if "Metaspace" in kinds:
            return False, steps[kinds.index("Metaspace")].get("prepend_scheme") != "never"
        if "ByteFallback" in kinds:
            return False, any(s.get("type") == "Strip" and s.get("start") == 1 for s in steps)
        raise ValueError(
            f"tokenizer decoder {kinds} is not known: ByteLevel, Metaspace and ByteFallback are"
        )

    @functools.cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(token for token, entry in self._added.items() if entry.special)


def read_backend(text: str, source: str) -> tokenizers.Tokenizer:
    """Parses a `tokenizer.json`.

    Args:
        text: the file's content.
        source: its path, for error messages.

    Raises:
        ValueError: it is not one.
    """
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # what the library raises for a bad file is just that
            raise
        raise ValueError(f"{source}: not a tokenizer: {error}") from error


class StreamDecoder:
    """Text from tokens as they come: a piece ends only where a character does.

    The pieces and `finish()`, joined, are what `Tokenizer.decode` gives for all the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def step(self, token: int) -> str:
        """What can be shown once `token` has come; may be empty.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        raw = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_special(token):
            # A control token before the text leaves the text's first space extra.
            return "" if self._skip_special else self._characters.decode(raw)
        if self._strip:
            self._strip, raw = False, raw.removeprefix(b" ")
        return self._characters.decode(raw)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self._characters.decode(b"", final=True)
