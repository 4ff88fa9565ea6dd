"""KVDrive's index of two levels: centroids of pages, then the pages of the best clusters."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.clusters import Clustering, cluster_mass
from kvjax.policies.entries import write_page
from kvjax.policies.index import PageIndex, PerPage, live_keys, live_mass
from kvjax.policies.low_bit import LowBitKeys
from kvjax.policies.sketch import Sketch, check_finite


@dataclasses.dataclass(frozen=True)
class Hierarchical:
    """Only pages of the clusters that a query likes are looked at (arXiv:2605.18071, its index).

    Page mean keys are clustered, as `Clustering` does. A look-up scores the centroids, takes the
    pages of the best clusters, a fixed number of them, and scores these by `below`; clusters are
    ranked by their share of softmax summed over the query heads of a KV head. KVDrive's own index
    has `below=MeanKeys()`; low-bit keys see single tokens that means do not show.

    Attributes:
      below: what pages are scored by.
      pages_per_cluster: pages a cluster has on average; KVDrive's 4,096 centroids at 60k tokens in
        chunks of 4 are 3.7.
      probe: share of the pages that are scored, above 0, at most 1. With 1 the mass is `below`'s.
      segment: pages clustered together, about; RetroInfer's 8,192 tokens in pages of 16.
      iterations: passes of k-means.

    Raises:
      KvjaxError: one of them is out of range.
    """

    below: Sketch = dataclasses.field(default_factory=LowBitKeys)
    pages_per_cluster: int = 4
    probe: float = 0.25
    segment: int = 512
    iterations: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.below, Sketch) or isinstance(self.below, PageIndex):
            raise KvjaxError(
                f"below is {self.below!r}: must be a sketch, such as LowBitKeys(3) or MeanKeys()"
            )
        check_integer("pages_per_cluster", self.pages_per_cluster, 1)
        if not (isinstance(self.probe, int | float) and 0 < self.probe <= 1):
            raise KvjaxError(
                f"probe is {self.probe!r}: must be above 0 and at most 1, the share of the pages "
                f"that are scored"
            )
        check_integer("segment", self.segment, 1)
        check_integer("iterations", self.iterations, 1)

    @property
    def clustering(self) -> Clustering:
        """How page mean keys are clustered."""
        return Clustering(self.pages_per_cluster, self.segment, self.iterations)

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`: `Clustering.build`'s arrays of pages and those of `below`."""
        keys = live_keys(keys, pages)
        check_finite(keys)
        means = jnp.mean(keys.astype(jnp.float32), axis=2).transpose(1, 0, 2)
        return {
            **self.clustering.build(means, pages),
            **_under(PerPage(self.below).build(keys, pages)),
        }

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`; the page begins a cluster, or joins one of its segment."""
        mean = jnp.mean(keys.astype(jnp.float32), axis=1)
        below, clusters = _split(arrays)
        clusters, _, member = self.clustering.join(clusters, page, mean)
        clusters = write_page(clusters, page, {"member": member[:, None]})
        return {**clusters, **_under(PerPage(self.below).extend(below, page, keys))}

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; softmax is over the pages that were scored."""
        below, clusters = _split(arrays)
        index = PerPage(self.below)
        kv_heads, num_pages = clusters["member"].shape
        candidates = math.ceil(self.probe * num_pages)
        if candidates == num_pages:
            return index.page_mass(below, queries, pages, scale, soft_cap=soft_cap)
        ids = self._candidates(clusters, queries, pages, scale, soft_cap, candidates)
        gathered = {
            name: jax.vmap(lambda pages, ids: pages[ids])(array, ids)
            for name, array in below.items()
        }
        scored = jnp.minimum(pages, candidates)
        mass = index.page_mass(gathered, queries, scored, scale, soft_cap=soft_cap)
        heads = mass.shape[0]
        spread = jnp.zeros((heads, num_pages), jnp.float32)
        row = jnp.arange(heads, dtype=jnp.int32)[:, None]
        spread = spread.at[row, jnp.repeat(ids, heads // kv_heads, axis=0)].set(mass)
        return live_mass(spread, pages)

    def _candidates(
        self,
        clusters: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        soft_cap: float | None,
        count: int,
    ) -> Int32[Array, "Hkv M"]:
        """Pages of the best clusters, ascending: live ones first, and all of those that fit."""
        kv_heads, num_pages = clusters["member"].shape
        share = cluster_mass(clusters, queries, scale, soft_cap)
        share = jnp.where(jnp.isnan(share), 0, share)
        share = jnp.sum(share.reshape(kv_heads, -1, share.shape[1]), axis=1)
        member = self.clustering.clusters_of(clusters["member"])
        rank = jnp.take_along_axis(share, member, axis=1)
        live = jnp.arange(num_pages, dtype=jnp.int32) < pages
        ids = lax.top_k(jnp.where(live[None, :], rank, -1), count)[1]
        return jnp.sort(ids.astype(jnp.int32), axis=1)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`."""
        clusters = kv_heads * self.clustering.bytes_per_point(head_dim)
        return clusters + self.below.bytes_per_page(kv_heads, head_dim, page_size)

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: the clusters, and `probe` of what is below."""
        below = self.below.bytes_per_page(kv_heads, head_dim, page_size)
        if self.probe == 1:
            return float(below)
        return kv_heads * self.clustering.bytes_per_point(head_dim) + self.probe * below


def _under(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of the level below, by names of their own."""
    return {f"below/{name}": array for name, array in arrays.items()}


def _split(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays of the level below, and those of the clusters."""
    below = {
        name.removeprefix("below/"): array
        for name, array in arrays.items()
        if name.startswith("below/")
    }
    clusters = {name: array for name, array in arrays.items() if not name.startswith("below/")}
    return below, clusters
