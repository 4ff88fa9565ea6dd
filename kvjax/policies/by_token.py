"""Choosing by token, as H2O and IMPRESS do, and the chunks that must be read for it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.errors import KvjaxError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokensInChunks:
    """Tokens that are used, and chunks that must be read for them.

    Read amplification is (chunks x tokens a chunk) / tokens.
    """

    tokens: Int32[Array, " K"]  # ascending and distinct; T where there are fewer
    chunks: Int32[Array, " C"]  # ascending and distinct; the number of chunks where there are fewer


def heavy_hitters(
    mass: Float32[Array, "H T"], tokens: Int32[Array, ""], *, count: int, chunk: int = 64
) -> TokensInChunks:
    """The tokens of greatest column sum of attention (H2O, arXiv:2306.14048, section 4).

    Args:
      mass: float32 [H, T], attention each token gets, as `ExactKeys.token_mass` gives it; summed
        over the heads.
      tokens: int32 scalar, live tokens; the others are never chosen.
      count: K, tokens kept, 1 to T.
      chunk: tokens a chunk holds.

    Returns:
      The choice; of tokens with equal mass the earlier one. C is min(K, ceil(T / chunk)).

    Raises:
      KvjaxError: `count` or `chunk` is out of range.
    """
    total = mass.shape[1]
    _check_counts(total, count, chunk)
    chosen = _top_tokens(jnp.sum(mass, axis=0)[None], tokens, count)[0]
    num_chunks = -(-total // chunk)
    held = jnp.zeros((num_chunks,), bool).at[chosen // chunk].set(chosen < total, mode="drop")
    chunks = jnp.where(held, jnp.arange(num_chunks, dtype=jnp.int32), num_chunks)
    return TokensInChunks(tokens=chosen, chunks=jnp.sort(chunks)[: min(count, num_chunks)])


def impress(
    mass: Float32[Array, "H T"],
    tokens: Int32[Array, ""],
    *,
    count: int,
    chunk: int = 64,
    alpha: float = 0.6,
) -> tuple[TokensInChunks, Bool[Array, ""]]:
    """IMPRESS's important tokens, found by a few probe heads (FAST'25, pp. 187-201).

    Each probe head has its own `count` tokens of greatest mass. The heads are similar if the mean
    Jaccard index of all pairs reaches (r / (2 - r)) ** alpha, where r = count / tokens and
    r / (2 - r) is what sets chosen at random would have. Then the tokens of greatest mass summed
    over the probe heads serve all heads; if not, all keys are to be read and `heavy_hitters` of
    all heads decides.

    Args:
      mass: float32 [H, T], attention each token gets from each probe head (the paper has H = 3,
        the layer's first). Where several query heads read one KV head, sum them before.
      tokens: int32 scalar, live tokens.
      count: K, tokens kept, 1 to T.
      chunk: tokens a chunk holds.
      alpha: exponent of the threshold, from 0 (all sets must be equal) up.

    Returns:
      The probe heads' choice, and a bool that says whether it may serve all heads. One probe head
      is always similar to itself.

    Raises:
      KvjaxError: `count`, `chunk` or `alpha` is out of range.
    """
    heads, total = mass.shape
    _check_counts(total, count, chunk)
    if not alpha >= 0:
        raise KvjaxError(f"alpha is {alpha!r}: must be 0 or more")
    choice = heavy_hitters(mass, tokens, count=count, chunk=chunk)
    own = _top_tokens(mass, tokens, count)
    row = jnp.arange(heads, dtype=jnp.int32)[:, None]
    member = jnp.zeros((heads, total), bool).at[row, own].set(True, mode="drop")
    pairs = [(a, b) for a in range(heads) for b in range(a)]
    if not pairs:
        return choice, jnp.bool_(True)
    both = jnp.stack([jnp.sum(member[a] & member[b], dtype=jnp.int32) for a, b in pairs])
    either = jnp.stack([jnp.sum(member[a] | member[b], dtype=jnp.int32) for a, b in pairs])
    jaccard = jnp.mean(both.astype(jnp.float32) / jnp.maximum(either, 1).astype(jnp.float32))
    live = jnp.clip(tokens, 1, total).astype(jnp.float32)
    kept = jnp.minimum(count / live, 1)
    return choice, jaccard >= (kept / (2 - kept)) ** alpha


def chunk_pages(
    chunks: Int32[Array, " C"], *, chunk: int, page_size: int, num_pages: int
) -> Int32[Array, " CP"]:
    """The pages that chunks are made of.

    Args:
      chunks: int32 [C], ascending; past the last chunk there is none.
      chunk: tokens a chunk holds, a multiple of `page_size`.
      page_size: P, tokens a page.
      num_pages: N.

    Returns:
      int32 [C x chunk / P], ascending; N where there is no page.

    Raises:
      KvjaxError: chunks are not made of whole pages.
    """
    if chunk % page_size:
        raise KvjaxError(
            f"chunk is {chunk} tokens: must be a multiple of the page size {page_size}"
        )
    together = chunk // page_size
    pages = chunks[:, None] * together + jnp.arange(together, dtype=jnp.int32)[None, :]
    return jnp.minimum(pages, num_pages).reshape(-1)


def _check_counts(total: int, count: int, chunk: int) -> None:
    """Refuse numbers of tokens that cannot be."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= total:
        raise KvjaxError(f"count is {count!r}: must be an integer, 1 to {total} tokens")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise KvjaxError(f"chunk is {chunk!r}: must be an integer of at least 1 token")


def _top_tokens(
    mass: Float32[Array, "H T"], tokens: Int32[Array, ""], count: int
) -> Int32[Array, "H K"]:
    """Each row's tokens of greatest mass, ascending, the earlier of equals; T past the live."""
    total = mass.shape[1]
    live = jnp.arange(total, dtype=jnp.int32)[None, :] < tokens
    score = jnp.where(live, jnp.where(jnp.isnan(mass), 0, mass), -jnp.inf)
    chosen = lax.top_k(score, count)[1].astype(jnp.int32)
    return jnp.sort(jnp.where(chosen < tokens, chosen, total), axis=1)
