"""RetroInfer's wave index: clusters of tokens that rank pages, and stand for those not read."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.clusters import Clustering, cluster_mass, cluster_scores
from kvjax.policies.entries import hold, loose, write_page
from kvjax.policies.index import live_keys, live_mass
from kvjax.policies.sketch import check_finite

_VALUE = "value.bfloat16"


@dataclasses.dataclass(frozen=True)
class RetroInfer:
    """Clusters of tokens in segments (arXiv:2505.02922, section 4), with an estimation zone.

    The paper reads whole clusters; here pages are read, and a page has the mass of its tokens, each
    of which is taken for its centroid. The estimation zone is `estimate`: what the best clusters
    hold outside the chosen pages counts as their centroid with their mean value.

    Attributes:
      tokens_per_cluster: tokens a cluster has on average.
      segment: tokens clustered together, about.
      iterations: passes of k-means.
      covered: share of the clusters that are read or estimated: the paper's 1.8 % and 23.2 %.

    Raises:
      KvjaxError: one of them is out of range.
    """

    tokens_per_cluster: int = 16
    segment: int = 8192
    iterations: int = 10
    covered: float = 0.25

    def __post_init__(self) -> None:
        check_integer("tokens_per_cluster", self.tokens_per_cluster, 1)
        _ = self.clustering
        if not 0 < self.covered <= 1:
            raise KvjaxError(
                f"covered is {self.covered!r}: must be above 0 and at most 1, the share of the "
                f"clusters that are not ignored"
            )

    @property
    def clustering(self) -> Clustering:
        """How tokens are clustered."""
        return Clustering(self.tokens_per_cluster, self.segment, self.iterations)

    def build(
        self,
        keys: Float[Array, "N Hkv P D"],
        pages: Int32[Array, ""],
        values: Float[Array, "N Hkv P Dv"] | None = None,
    ) -> dict[str, Array]:
        """See `EstimatingIndex.build`.

        Args:
          keys: see `PageIndex.build`.
          pages: see `PageIndex.build`.
          values: [N, Hkv, P, Dv], or None.

        Returns:
          `Clustering.build`'s arrays of the tokens, `member` [Hkv, N, P]; with values also
          `value.bfloat16` [Hkv, C, Dv], the bits of each cluster's mean value.

        Raises:
          KvjaxError: (outside jit) a live key or value that is infinite or NaN.
        """
        keys = live_keys(keys, pages)
        check_finite(keys)
        tokens = pages * keys.shape[2]
        arrays = self.clustering.build(_by_token(keys), tokens)
        if values is not None:
            values = live_keys(values, pages)
            check_finite(values)
            means = self.clustering.means(arrays, _by_token(values), tokens)
            arrays |= hold({"value": means.astype(jnp.bfloat16)})
        arrays["member"] = arrays["member"].reshape(keys.shape[1], -1, keys.shape[2])
        return arrays

    def extend(
        self,
        arrays: Mapping[str, Array],
        page: Int32[Array, ""],
        keys: Float[Array, "Hkv P D"],
        values: Float[Array, "Hkv P Dv"] | None = None,
    ) -> dict[str, Array]:
        """See `EstimatingIndex.extend`; tokens begin clusters, or join those of their segment.

        Raises:
          KvjaxError: values are missing, or there is no room for them.
        """
        if (values is None) == (_VALUE in arrays):
            raise KvjaxError(
                f"values are {'missing' if values is None else 'given'}, but the index was built "
                f"with{'out' if values is not None else ''} values: give them to both or to none"
            )
        page_size = keys.shape[1]
        head = jnp.arange(keys.shape[0], dtype=jnp.int32)

        def join(
            token: Array, carry: tuple[dict[str, Array], Array]
        ) -> tuple[dict[str, Array], Array]:
            arrays, members = carry
            key = lax.dynamic_index_in_dim(keys, token, axis=1, keepdims=False)
            arrays, cluster, member = self.clustering.join(arrays, page * page_size + token, key)
            members = members.at[:, 0, token].set(member)
            if values is None:
                return arrays, members
            value = lax.dynamic_index_in_dim(values, token, axis=1, keepdims=False)
            size = arrays["size"][head, cluster].astype(jnp.float32)[:, None]
            old = loose({_VALUE: arrays[_VALUE][head, cluster]})["value"].astype(jnp.float32)
            old = jnp.where(size > 1, old, 0)
            moved = old + (value.astype(jnp.float32) - old) / jnp.maximum(size, 1)
            entry = hold({"value": moved.astype(jnp.bfloat16)})[_VALUE]
            written = arrays[_VALUE].at[head, cluster].set(entry, mode="drop")
            return {**arrays, _VALUE: written}, members

        blank = jnp.zeros((keys.shape[0], 1, page_size), jnp.uint16)
        grown, members = lax.fori_loop(0, page_size, join, (dict(arrays), blank))
        return write_page(grown, page, {"member": members})

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; softmax is over tokens, each as its cluster's centroid."""
        share = cluster_mass(arrays, queries, scale, soft_cap)
        heads, num_pages, page_size = arrays["member"].shape
        share = share.reshape(heads, -1, share.shape[1])
        cluster = self.clustering.clusters_of(_flat(arrays["member"]))
        by_token = jnp.take_along_axis(share, cluster[:, None, :], axis=2)
        mass = jnp.sum(by_token.reshape(-1, num_pages, page_size), axis=2)
        return live_mass(mass, pages)

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
        """See `EstimatingIndex.estimate`.

        Of the clusters of greatest share of softmax, summed over the query heads of a KV head,
        `covered` of all count. Each is one key, its centroid, as often as it has tokens on live
        pages that are not chosen, with the mean of its values (section 4.3; the paper reads whole
        clusters, so there none is part read and part estimated).

        Raises:
          KvjaxError: the index was built without values, or head counts or widths do not fit.
        """
        if _VALUE not in arrays:
            raise KvjaxError("the index was built without values: give build(...) the values too")
        scores = cluster_scores(arrays, queries, scale, soft_cap)
        value = loose(arrays)["value"].astype(jnp.float32)
        heads, count, _ = value.shape
        num_pages, page_size = arrays["member"].shape[1:]
        live = jnp.arange(num_pages, dtype=jnp.int32) < pages
        unread = jnp.repeat(live[None, :] & ~chosen, page_size, axis=1).astype(jnp.int32)
        cluster = self.clustering.clusters_of(_flat(arrays["member"]))
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        left = jnp.zeros((heads, count), jnp.int32).at[head, cluster].add(unread)

        share = cluster_mass(arrays, queries, scale, soft_cap)
        share = jnp.where(jnp.isnan(share), 0, share).reshape(heads, -1, count)
        order = jnp.argsort(-jnp.sum(share, axis=1), axis=1)
        place = jnp.argsort(order, axis=1).astype(jnp.int32)
        held = jnp.sum((arrays["size"] > 0).astype(jnp.int32), axis=1, keepdims=True)
        counted = place < jnp.ceil(self.covered * held.astype(jnp.float32)).astype(jnp.int32)
        left = jnp.repeat(jnp.where(counted, left, 0), scores.shape[0] // heads, axis=0)

        logits = jnp.where(left > 0, scores + jnp.log(left.astype(jnp.float32)), -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=1)
        weight = jnp.where(left > 0, jnp.exp(logits - lse[:, None]), 0)
        out = jnp.matmul(weight.reshape(heads, -1, count), value, precision=lax.Precision.HIGHEST)
        return out.reshape(scores.shape[0], -1), lse

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`; with values, as many channels as the keys have."""
        values = 2 * head_dim / self.tokens_per_cluster
        return kv_heads * page_size * (self.clustering.bytes_per_point(head_dim) + values)

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all of them."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)


def _by_token(pages: Float[Array, "N Hkv P D"]) -> Float[Array, "Hkv T D"]:
    """Tokens one after the other, head by head."""
    num_pages, heads, page_size, dim = pages.shape
    return pages.transpose(1, 0, 2, 3).reshape(heads, num_pages * page_size, dim)


def _flat(member: UInt16[Array, "Hkv N P"]) -> UInt16[Array, "Hkv T"]:
    """Members token after token, as `Clustering` has them."""
    return member.reshape(member.shape[0], -1)
