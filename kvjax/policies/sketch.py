"""Sketches: what stands in for a prefix's keys when its pages are chosen.

All of one layer's arrays are head-major, [Hkv, N, ...], one entry a page: a page's sketch depends
on that page's keys only. They are small, and stay in memory while the keys are on disk.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.errors import KvjaxError
from kvjax.policies.mass import dot, group_rows, scaled, softmax_mass


@runtime_checkable
class Sketch(Protocol):
    """One way to guess each page's attention mass without its keys. Hashable, static under jit."""

    def build(self, keys: Float[Array, "N Hkv P D"]) -> dict[str, Array]:
        """One layer's sketch.

        Args:
          keys: [N, Hkv, P, D], position encoding applied, every slot a token.

        Raises:
          KvjaxError: a size that this sketch cannot hold, or (outside jit) a key that is infinite
            or NaN.
        """

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """Each page's share of every query's softmax over the prefix, summed over valid queries.

        Args:
          arrays: what `build` made, padded to N pages with anything.
          queries: [S, Hq, D], position encoding applied; query head h reads KV head
            h // (Hq / Hkv).
          valid: bool [S]; queries that are padding may hold anything.
          pages: int32 scalar, live pages; the others get exactly 0.
          scale: factor of the scores, as attention uses it.
          soft_cap: cap of the scores, as attention uses it, or None.

        Raises:
          KvjaxError: head counts or widths that do not fit.
        """

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> int:
        """Bytes of the arrays of one page in one layer.

        Args:
          kv_heads: Hkv.
          head_dim: D.
          page_size: P, tokens a page.
        """


@dataclasses.dataclass(frozen=True)
class MeanKeys:
    """A page is its mean key (ShadowKV's landmarks, arXiv:2410.21465, section 4.1)."""

    def build(self, keys: Float[Array, "N Hkv P D"]) -> dict[str, Array]:
        """See `Sketch.build`: `mean`, bfloat16 [Hkv, N, D]."""
        check_finite(keys)
        mean = jnp.mean(jnp.asarray(keys).astype(jnp.float32), axis=2)
        return {"mean": mean.transpose(1, 0, 2).astype(jnp.bfloat16)}

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `Sketch.page_mass`; softmax is over pages, each as if it were one token."""
        mean = arrays["mean"]
        check_queries(queries, valid, mean.shape[0], mean.shape[2])
        scores = dot(mean, group_rows(queries, valid, mean.shape[0]))
        return _mass_of_pages(scores, queries, valid, pages, scale, soft_cap)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> int:
        """See `Sketch.bytes_per_page`."""
        return 2 * kv_heads * head_dim


@dataclasses.dataclass(frozen=True)
class QuestBounds:
    """A page is the bounds of its keys, channel by channel (Quest, arXiv:2406.10774, section 3.3).

    A query's score of a page is the greatest that any key within the bounds could give it.
    """

    def build(self, keys: Float[Array, "N Hkv P D"]) -> dict[str, Array]:
        """See `Sketch.build`: `low` and `high`, bfloat16 [Hkv, N, D]."""
        check_finite(keys)
        keys = jnp.asarray(keys)
        bounds = {"low": jnp.min(keys, axis=2), "high": jnp.max(keys, axis=2)}
        return {
            name: bound.transpose(1, 0, 2).astype(jnp.bfloat16) for name, bound in bounds.items()
        }

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `Sketch.page_mass`; softmax is over the pages' upper bounds."""
        low, high = arrays["low"], arrays["high"]
        check_queries(queries, valid, low.shape[0], low.shape[2])
        rows = group_rows(queries, valid, low.shape[0])
        scores = dot(high, jnp.maximum(rows, 0)) + dot(low, jnp.minimum(rows, 0))
        return _mass_of_pages(scores, queries, valid, pages, scale, soft_cap)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> int:
        """See `Sketch.bytes_per_page`."""
        return 4 * kv_heads * head_dim


def check_finite(keys: Array) -> None:
    """Refuse keys that no sketch can stand for. Keys that are being traced are not looked at.

    Args:
      keys: [N, Hkv, P, D].

    Raises:
      KvjaxError: not four axes, or a key that is infinite or NaN.
    """
    if keys.ndim != 4:
        raise KvjaxError(
            f"keys have shape {keys.shape}: must be [pages, KV heads, tokens a page, head_dim]"
        )
    if isinstance(keys, jax.core.Tracer):
        return
    finite = np.isfinite(np.asarray(keys).astype(np.float32))
    if not finite.all():
        page, head, token, channel = np.argwhere(~finite)[0]
        raise KvjaxError(
            f"keys[{page}, {head}, {token}, {channel}] is {keys[page, head, token, channel]}: a "
            f"sketch needs finite keys; pass only pages whose every slot holds a token"
        )


def check_queries(queries: Array, valid: Array, kv_heads: int, head_dim: int) -> None:
    """Refuse queries that do not fit a sketch, before tracing.

    Args:
      queries: [S, Hq, D].
      valid: [S].
      kv_heads: Hkv of the sketch.
      head_dim: D of the sketch.

    Raises:
      KvjaxError: another width, heads that do not divide, or not one flag a query.
    """
    if queries.ndim != 3 or queries.shape[2] != head_dim or queries.shape[1] % kv_heads:
        raise KvjaxError(
            f"queries have shape {queries.shape}: must be [queries, query heads, head_dim] with a "
            f"multiple of the sketch's {kv_heads} KV heads and its head_dim {head_dim}"
        )
    if valid.shape != queries.shape[:1]:
        raise KvjaxError(
            f"valid has shape {valid.shape}: must be {queries.shape[:1]}, one flag a query"
        )


def _mass_of_pages(
    scores: Float32[Array, "Hkv N R"],
    queries: Float[Array, "S Hq D"],
    valid: Bool[Array, " S"],
    pages: Int32[Array, ""],
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "Hq N"]:
    """Softmax over pages that have one score each; all at once, since there is one a page."""
    kv_heads, num_pages, _ = scores.shape
    return softmax_mass(
        lambda start: scaled(scores, scale, soft_cap)[:, :, None, :],
        num_pages=num_pages,
        block_pages=num_pages,
        kv_heads=kv_heads,
        valid=valid,
        query_heads=queries.shape[1],
        pages=pages,
    )
