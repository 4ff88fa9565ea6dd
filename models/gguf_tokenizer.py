"""The tokenizer a GGUF file carries, rebuilt for the `tokenizers` library."""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvjax.models.gguf_file import GGUFFile
from kvjax.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = ("smollm",)  # a digit is a word of its own before the pattern applies
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a known word is not merged up
_COMPOSED = ("qwen2",)  # trained on Unicode NFC

_END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
    }
)
"""Control tokens that end a turn or a text in these families; files name only one of them."""


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds a file's tokenizer.

    Raises:
        ValueError: a field is missing, or describes a tokenizer of a kind not known here.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    pieces = _array(file, "tokens", str)
    types = _array(file, "token_type", int)
    if len(types) != len(pieces):
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.token_type has {len(types)} entries, "
            f"tokens has {len(pieces)}"
        )
    if kind == "gpt2":
        backend, add_bos = _byte_level(file, pieces), False
    elif kind == "llama":
        backend, add_bos = _sentence_pieces(file, pieces), True
    else:
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.model is {kind!r}; gpt2 and llama are known"
        )
    control = [piece for piece, what in zip(pieces, types, strict=True) if what == _CONTROL]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    literal = [piece for piece, what in zip(pieces, types, strict=True) if what == _USER_DEFINED]
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in literal])
    end = _token(file, "eos_token_id", len(pieces))
    ends = {end, _token(file, "eot_token_id", len(pieces))}
    ends |= {
        index
        for index, (piece, what) in enumerate(zip(pieces, types, strict=True))
        # Gemma's "</s>" is the HTML tag: plain text.
        if piece in _END_OF_TURN and what == _CONTROL
    }
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        bos_id=_token(file, "bos_token_id", len(pieces)),
        eos_ids=frozenset(token for token in ends if token is not None),
        add_bos=bool(file.metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        chat_template=template if isinstance(template, str) else None,
        eos_id=end,
    )


def _array(file: GGUFFile, key: str, of: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not isinstance(values[0], of):
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.{key} must be a list of {of.__name__}"
        )
    return values


def _token(file: GGUFFile, key: str, count: int) -> int | None:
    token = file.metadata.get(f"tokenizer.ggml.{key}")
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < count:
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.{key} is {token!r}, not a token id below {count}"
        )
    return token


def _ids(pieces: list[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(pieces)}


def _byte_level(file: GGUFFile, pieces: list[str]) -> tokenizers.Tokenizer:
    """GPT-2's scheme: text is cut into words by a pattern, words into bytes, bytes are merged."""
    words = file.metadata.get("tokenizer.ggml.pre")
    if words not in _WORDS:
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.pre is {words!r}; {', '.join(_WORDS)} are known"
        )
    vocabulary, merges = _ids(pieces), []
    for index, merge in enumerate(_array(file, "merges", str)):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ValueError(
                f"{file.path}: metadata tokenizer.ggml.merges[{index}] is {merge!r}, whose parts "
                "are not all in the vocabulary"
            )
        merges.append((left, right))
    whole = words in _WHOLE_WORDS_FIRST
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if words in _SINGLE_DIGITS else []
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *digits,
            pre_tokenizers.Split(Regex(_WORDS[words]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if words in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(file: GGUFFile, pieces: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's scheme: characters are merged by score, what is unknown becomes bytes."""
    scores = _array(file, "scores", float)
    if len(scores) != len(pieces):
        raise ValueError(
            f"{file.path}: metadata tokenizer.ggml.scores has {len(scores)} entries, "
            f"tokens has {len(pieces)}"
        )
    vocabulary = _ids(pieces)
    unknown = _token(file, "unknown_token_id", len(pieces))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best first.

    SentencePiece merges whichever neighbours make the best-scored piece; ranked pairs say the same.
    """
    found = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
