"""Page indexes: what a decode step asks which pages of a sequence deserve attention.

An index is of one sequence and one layer; a batch is a `jax.vmap` over it. Its arrays have room for
N pages from the start, so a sequence grows without new shapes: `extend` writes one page's entries
in place and never rewrites the rest.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.errors import KvjaxError
from kvjax.policies.entries import hold, loose, write_page
from kvjax.policies.mass import softmax_mass
from kvjax.policies.sketch import Sketch


@runtime_checkable
class PageIndex(Protocol):
    """One way to tell pages apart by a query, and to grow. Hashable, static under jit."""

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """The index of the first pages of a sequence, with room for all N.

        Args:
          keys: [N, Hkv, P, D], position encoding applied; every slot of a live page a token.
          pages: int32 scalar, live pages, 0 to N; what the others hold has no effect.

        Raises:
          KvjaxError: a size that this index cannot hold, or (outside jit) a live key that is
            infinite or NaN.
        """

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """The index with one more page. Same shapes; in place where `arrays` is donated.

        Args:
          arrays: what `build` or `extend` made.
          page: int32 scalar, the new page's number, which is how many there were. A page of
            number N or more has no room and changes nothing: under `jax.vmap`, N is how a
            sequence says that no page of its has filled.
          keys: [Hkv, P, D], the page's keys, position encoding applied.
        """

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """Each page's estimated share of one token's softmax over the pages.

        Args:
          arrays: what `build` or `extend` made.
          queries: [Hq, D], position encoding applied; query head h reads KV head h // (Hq / Hkv).
          pages: int32 scalar, live pages, 0 to N.
          scale: factor of the scores, as attention uses it.
          soft_cap: cap of the scores, as attention uses it, or None.

        Returns:
          float32 [Hq, N]; exactly 0 for pages that are not live and for those that the index ruled
          out without a closer look. Live pages of a query that is not finite may have NaN, which
          `select` counts as 0.

        Raises:
          KvjaxError: head counts or widths that do not fit.
        """

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """Bytes of one layer's arrays, averaged over the pages.

        What does not grow with the pages is not counted.

        Args:
          kv_heads: Hkv.
          head_dim: D.
          page_size: P, tokens a page.
        """

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """Bytes of them that one look-up reads, averaged over all the pages; see the above."""


@runtime_checkable
class EstimatingIndex(PageIndex, Protocol):
    """A `PageIndex` that also stands for what is not read: attention counts its estimate of that.

    The decode loop gives it the values, and merges its estimate with attention to the chosen pages.
    """

    def build(
        self,
        keys: Float[Array, "N Hkv P D"],
        pages: Int32[Array, ""],
        values: Float[Array, "N Hkv P Dv"] | None = None,
    ) -> dict[str, Array]:
        """See `PageIndex.build`; without values there is no estimate.

        Args:
          keys: see `PageIndex.build`.
          pages: see `PageIndex.build`.
          values: [N, Hkv, P, Dv], of the same tokens.
        """

    def extend(
        self,
        arrays: Mapping[str, Array],
        page: Int32[Array, ""],
        keys: Float[Array, "Hkv P D"],
        values: Float[Array, "Hkv P Dv"] | None = None,
    ) -> dict[str, Array]:
        """See `PageIndex.extend`.

        Args:
          arrays: see `PageIndex.extend`.
          page: see `PageIndex.extend`.
          keys: see `PageIndex.extend`.
          values: [Hkv, P, Dv], if and only if the index was built with values.
        """

    def estimate(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        chosen: Bool[Array, "Hkv N"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Float32[Array, "Hq Dv"], Float32[Array, " Hq"]]:
        """Attention to the live pages that are not chosen, as well as the index knows it.

        Args:
          arrays: what `build` or `extend` made, with values.
          queries: see `PageIndex.page_mass`.
          chosen: bool [Hkv, N], the pages that are read.
          pages: see `PageIndex.page_mass`.
          scale: see `PageIndex.page_mass`.
          soft_cap: see `PageIndex.page_mass`.

        Returns:
          float32 [Hq, Dv], and its log-sum-exp, float32 [Hq]: -inf, exactly, where every live page
          is chosen, so that attention to all pages stays exact.
        """


@dataclasses.dataclass(frozen=True)
class PerPage:
    """The index whose entries are one sketch a page, all of them looked at.

    `extend` equals building again, since an entry depends on its page only.

    Attributes:
      sketch: what stands for a page.
    """

    sketch: Sketch

    def __post_init__(self) -> None:
        if not isinstance(self.sketch, Sketch) or isinstance(self.sketch, type):
            raise KvjaxError(f"sketch is {self.sketch!r}: must be a sketch, such as MeanKeys()")

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`: the sketch's own arrays, [Hkv, N, ...], held by their bits."""
        return hold(self.sketch.build(live_keys(keys, pages)))

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`."""
        return write_page(arrays, page, self.sketch.build(keys[None]))

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; the mass that the sketch gives."""
        mass = self.sketch.page_mass(
            loose(arrays), queries[None], jnp.ones((1,), bool), pages, scale, soft_cap=soft_cap
        )
        return live_mass(mass, pages)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`."""
        return float(self.sketch.bytes_per_page(kv_heads, head_dim, page_size))

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all of them."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)


def live_keys(
    keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]
) -> Float[Array, "N Hkv P D"]:
    """Keys with 0 in the pages that are not live.

    Args:
      keys: [N, Hkv, P, D].
      pages: int32 scalar, live pages.
    """
    live = jnp.arange(keys.shape[0], dtype=jnp.int32) < pages
    return jnp.where(live[:, None, None, None], keys, 0)


def live_mass(mass: Float32[Array, "Hq N"], pages: Int32[Array, ""]) -> Float32[Array, "Hq N"]:
    """Mass with 0 for the pages that are not live, NaN there too.

    Args:
      mass: float32 [Hq, N].
      pages: int32 scalar, live pages.
    """
    live = jnp.arange(mass.shape[1], dtype=jnp.int32) < pages
    return jnp.where(live[None, :], mass, 0)


def mass_of_scores(
    scores: Float32[Array, "Hkv N P G"], pages: Int32[Array, ""]
) -> Float32[Array, "Hq N"]:
    """Each page's share of softmax over the tokens of live pages.

    Args:
      scores: float32 [Hkv, N, P, G], of each token by the G query heads of its KV head, scaled;
        anything in pages that are not live.
      pages: int32 scalar, live pages.
    """
    kv_heads, num_pages, _, group = scores.shape
    mass = softmax_mass(
        lambda start: scores,
        num_pages=num_pages,
        block_pages=num_pages,
        kv_heads=kv_heads,
        valid=jnp.ones((1,), bool),
        query_heads=kv_heads * group,
        pages=pages,
    )
    return live_mass(mass, pages)
