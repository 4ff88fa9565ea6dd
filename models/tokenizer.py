"""Text to token ids and back."""

import dataclasses
from collections.abc import Sequence

import tokenizers


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer."""

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if (self.add_bos if add_bos is None else add_bos) and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))
