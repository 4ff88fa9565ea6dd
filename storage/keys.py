"""The one name of a page, for every tier: a hash over all that its keys and values depend on.

A page's keys and values are a function of the model, of how it computes, and of every token up to
the page's end. So a page is named by a SHA-256 chain: the first link hashes what is the same for
the whole prefix, each further link hashes the link before it and the tokens of one page. Every
field is preceded by its name and its length, so that no two different inputs are the same bytes.
Nothing about the machine, the process or the size of a pool is in it.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

SCHEMA = "kvjax page key 1"
_HIGHEST_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Identity:
    """What keys and values depend on besides the tokens.

    Two requests share pages only if all five are equal. A display name is no identity: an adapter
    or model that changes must change its digest.
    """

    weights: str  # SHA-256 of the model's weights, in hexadecimal
    numerics: str  # canonical text of dtype, rotary positions and attention settings
    adapter: str = ""  # digest of a LoRA or other adapter; "" is none
    tenant: str = ""  # who may share: pages of one tenant are never found by another
    inputs: str = ""  # digest of images or other inputs that tokens stand for; "" is none

    def __post_init__(self) -> None:
        """Refuses fields that are no text, and an identity that names no weights."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                raise ValueError(f"Identity.{field.name} is {value!r}; give a str")
        if not self.weights:
            raise ValueError("Identity.weights is ''; give the SHA-256 of the model's weights")


def page_keys(
    identity: Identity,
    namespace: str,
    tokens: Sequence[int] | np.ndarray,
    page_size: int,
) -> list[str]:
    """The key of each full page of a prompt: 64 hexadecimal digits each.

    Args:
      identity: what keys and values depend on besides the tokens.
      namespace: what the bytes behind the key depend on besides that: "" for the pages as such, a
        layout and dtype for pages stored in one way.
      tokens: token ids from the first of the prompt on, each in 0 .. 2**31 - 1.
      page_size: tokens in a page, at least 1.

    Returns:
      One key for each of the len(tokens) // page_size full pages. Key i names the tokens up to
      and including page i, so two prompts agree in key i exactly if they agree in all of these.

    Raises:
      ValueError: a token or the page size is out of range.
    """
    ids = token_array(tokens)
    return _chain(identity, namespace, ids, page_size)[: len(ids) // max(page_size, 1)]


def prompt_key(
    identity: Identity, namespace: str, tokens: Sequence[int] | np.ndarray, page_size: int
) -> str:
    """The key of all tokens of a prompt: its last page's, or if tokens follow, one more link.

    Args:
      identity: as in `page_keys`.
      namespace: as in `page_keys`.
      tokens: at least one.
      page_size: tokens in a page, at least 1.

    Raises:
      ValueError: there is no token, or a token or the page size is out of range.
    """
    ids = token_array(tokens)
    if not len(ids):
        raise ValueError("tokens are none; a key is that of at least one")
    return _chain(identity, namespace, ids, page_size)[-1]


def _chain(identity: Identity, namespace: str, ids: np.ndarray, page_size: int) -> list[str]:
    """A link for each page, the last of which may be less than full: its length sets it apart."""
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; a page holds at least 1 token")
    fields = [("schema", SCHEMA), ("namespace", namespace), ("page_size", str(page_size))]
    fields += dataclasses.asdict(identity).items()
    link = hashlib.sha256(b"".join(_tagged(fields))).digest()
    keys = []
    for begin in range(0, len(ids), page_size):
        data = ids[begin : begin + page_size].astype("<i8").tobytes()
        link = hashlib.sha256(link + data).digest()
        keys.append(link.hex())
    return keys


def token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as a read-only int32 array [T].

    Raises:
      ValueError: not one row of whole numbers in 0 .. 2**31 - 1.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        ids = ids.astype(np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"tokens have shape {ids.shape} and dtype {ids.dtype}; give one row of whole numbers"
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > _HIGHEST_TOKEN):
        raise ValueError(
            f"tokens lie in {ids.min()} .. {ids.max()}; a token id is in 0 .. {_HIGHEST_TOKEN}"
        )
    result = ids.astype(np.int32, copy=True)
    result.flags.writeable = False
    return result


def _tagged(fields: Iterable[tuple[str, str]]) -> Iterable[bytes]:
    """Names and values, each after its length in 8 bytes: no two lists of fields look the same."""
    for part in (text for field in fields for text in field):
        data = part.encode("utf-8", "surrogatepass")
        yield len(data).to_bytes(8, "little")
        yield data
