"""Clusters of points in the order of a sequence, segment by segment, and points that join later."""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt16

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.entries import hold, loose
from kvjax.policies.k_means import closeness, cluster_means, k_means
from kvjax.policies.mass import dot, group_rows, scaled
from kvjax.policies.sketch import check_queries

_MOST_CLUSTERS = 2**16


@dataclasses.dataclass(frozen=True)
class Clustering:
    """How points are clustered (RetroInfer's wave index, arXiv:2505.02922, section 4.2).

    Points are centred by their mean and cut into segments of consecutive points. Each segment has
    its own clusters by spherical k-means: a point belongs to the centroid of greatest cosine.

    Attributes:
      per_cluster: points a cluster has on average.
      segment: points a segment has, about; segments of equal length fill the room there is.
      iterations: passes over the points.

    Raises:
      KvjaxError: one of them is no integer of at least 1.
    """

    per_cluster: int
    segment: int
    iterations: int = 10

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name), 1)

    def shape(self, room: int) -> tuple[int, int, int]:
        """Segments, points a segment, and clusters a segment.

        Args:
          room: T, points there is room for.

        Raises:
          KvjaxError: more clusters a segment than 16 bits can tell apart.
        """
        segments = max(round(room / self.segment), 1)
        clusters = math.ceil(room / segments / self.per_cluster)
        if clusters > _MOST_CLUSTERS:
            raise KvjaxError(
                f"segments of {self.segment} points in clusters of {self.per_cluster} have "
                f"{clusters} clusters: must be at most {_MOST_CLUSTERS}; give a smaller segment"
            )
        return segments, clusters * self.per_cluster, clusters

    def build(self, points: Float[Array, "H T D"], count: Int32[Array, ""]) -> dict[str, Array]:
        """Clusters of the first points.

        Args:
          points: [H, T, D], for each head on its own.
          count: int32 scalar, how many points there are; what the others hold has no effect.

        Returns:
          Held as `kvjax.policies.entries.hold` does: `centroid` bfloat16 [H, C, D], the mean of the
          cluster's points; `size` int32 [H, C], how many they are, 0 where there is no cluster;
          `member` uint16 [H, T], each point's cluster within its segment; `centre` float32 [H, D].
        """
        heads, room, dim = points.shape
        segments, length, clusters = self.shape(room)
        live = jnp.arange(room, dtype=jnp.int32) < count
        points = jnp.where(live[None, :, None], points.astype(jnp.float32), 0)
        centre = jnp.sum(points, axis=1) / jnp.maximum(count, 1).astype(jnp.float32)
        points = jnp.where(live[None, :, None], points - centre[:, None, :], 0)
        points = jnp.pad(points, ((0, 0), (0, segments * length - room), (0, 0)))
        counts = jnp.arange(segments, dtype=jnp.int32) * length
        counts = jnp.clip(count - counts, 0, length)

        def fit(segment: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            here, count = segment
            started = (count + (self.per_cluster - 1)) // self.per_cluster
            return k_means(here, count, started, clusters, self.iterations, spherical=True)

        centroids, sizes, members = lax.map(
            fit,
            (points.reshape(heads * segments, length, dim), jnp.tile(counts, heads)),
        )
        centroids = centroids.reshape(heads, segments * clusters, dim) + centre[:, None, :]
        return hold(
            {
                "centroid": centroids.astype(jnp.bfloat16),
                "size": sizes.reshape(heads, -1),
                "member": members.reshape(heads, -1)[:, :room].astype(jnp.uint16),
                "centre": centre,
            }
        )

    def join(
        self, arrays: Mapping[str, Array], index: Int32[Array, ""], point: Float[Array, "H D"]
    ) -> tuple[dict[str, Array], Int32[Array, " H"], UInt16[Array, " H"]]:
        """One more point: in a new cluster while its segment has room for one, else the nearest.

        Args:
          arrays: what `build` or `join` made.
          index: int32 scalar, the point's number, which is how many there were. At T or more there
            is no room, and nothing changes.
          point: [H, D].

        Returns:
          The arrays, whose changed centroid is a running mean; the clusters that the point joined,
          int32 [H], C where there was no room; and the same within the segment, uint16 [H], which
          is for the caller to write into `member`: it may have several points to write at once.
        """
        heads, *points = arrays["member"].shape
        room = math.prod(points)
        _, length, clusters = self.shape(room)
        first = index // length * clusters
        here = lax.dynamic_slice_in_dim(arrays["centroid.bfloat16"], first, clusters, axis=1)
        centroids = loose({"centroid.bfloat16": here})["centroid"].astype(jnp.float32)
        sizes = lax.dynamic_slice_in_dim(arrays["size"], first, clusters, axis=1)
        point = point.astype(jnp.float32)
        centre = arrays["centre"]
        scores = closeness(
            (point - centre)[:, None, :], centroids - centre[:, None, :], spherical=True
        )[:, 0]
        empty = sizes == 0
        scores = jnp.where(empty, -jnp.inf, scores)
        chosen = jnp.where(
            jnp.any(empty, axis=1), jnp.argmax(empty, axis=1), jnp.argmax(scores, axis=1)
        ).astype(jnp.int32)
        head = jnp.arange(heads, dtype=jnp.int32)
        size, old = sizes[head, chosen], centroids[head, chosen]
        old = jnp.where(size[:, None] > 0, old, point)
        moved = old + (point - old) / (size + 1).astype(jnp.float32)[:, None]
        cluster = jnp.where(index < room, first + chosen, arrays["size"].shape[1])
        changed = {"centroid": moved.astype(jnp.bfloat16), "size": size + 1}
        joined = {
            name: arrays[name].at[head, cluster].set(entry, mode="drop")
            for name, entry in hold(changed).items()
        }
        return {**arrays, **joined}, cluster, chosen.astype(jnp.uint16)

    def means(
        self, arrays: Mapping[str, Array], points: Float[Array, "H T V"], count: Int32[Array, ""]
    ) -> Float32[Array, "H C V"]:
        """The mean of what goes with each cluster's points, 0 where a cluster has none.

        Args:
          arrays: what `build` made of `count` points.
          points: [H, T, V], such as the values of the clustered keys.
          count: int32 scalar; what the others hold has no effect.
        """
        heads, room, dim = points.shape
        segments, length, clusters = self.shape(room)
        live = jnp.arange(room, dtype=jnp.int32) < count
        points = jnp.where(live[None, :, None], points.astype(jnp.float32), 0)
        member = jnp.where(live[None, :], arrays["member"].astype(jnp.int32), clusters)
        short = segments * length - room
        points = jnp.pad(points, ((0, 0), (0, short), (0, 0)))
        member = jnp.pad(member, ((0, 0), (0, short)), constant_values=clusters)
        slot = jnp.arange(clusters, dtype=jnp.int32)

        def mean(segment: tuple[Array, Array]) -> Array:
            here, member = segment
            return cluster_means(here, (member[:, None] == slot[None, :]).astype(jnp.float32))[0]

        by_segment = (
            points.reshape(heads * segments, length, dim),
            member.reshape(heads * segments, length),
        )
        found: Array = lax.map(mean, by_segment)
        return found.reshape(heads, segments * clusters, dim)

    def clusters_of(self, member: UInt16[Array, "H T"]) -> Int32[Array, "H T"]:
        """Each point's cluster, 0 to C - 1.

        Args:
          member: uint16 [H, T], as `build` made it.
        """
        room = member.shape[1]
        _, length, clusters = self.shape(room)
        first = jnp.arange(room, dtype=jnp.int32) // length * clusters
        return first[None, :] + member.astype(jnp.int32)

    def bytes_per_point(self, dim: int) -> float:
        """Bytes of a head's arrays, averaged over the points.

        Args:
          dim: D.
        """
        return (2 * dim + 4) / self.per_cluster + 2


def cluster_mass(
    arrays: Mapping[str, Array],
    queries: Float[Array, "Hq D"],
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "Hq C"]:
    """One point's share of each head's softmax, if all points of a cluster were its centroid.

    Args:
      arrays: what `Clustering.build` made.
      queries: [Hq, D]; query head h reads head h // (Hq / H) of the clusters.
      scale: factor of the scores.
      soft_cap: cap of the scores, or None.

    Returns:
      float32 [Hq, C], which sums to 1 over all points; 0 where a cluster has none.

    Raises:
      KvjaxError: head counts or widths that do not fit.
    """
    scores = cluster_scores(arrays, queries, scale, soft_cap)
    size = arrays["size"]
    size = jnp.repeat(size, scores.shape[0] // size.shape[0], axis=0)
    peak = jnp.max(scores, axis=1, keepdims=True, where=size > 0, initial=-jnp.inf)
    weight = jnp.exp(jnp.where(size > 0, scores - peak, -jnp.inf))
    total = jnp.sum(weight * size.astype(jnp.float32), axis=1, keepdims=True)
    return weight / jnp.where(total == 0, 1, total)


def cluster_scores(
    arrays: Mapping[str, Array],
    queries: Float[Array, "Hq D"],
    scale: float,
    soft_cap: float | None,
) -> Float32[Array, "Hq C"]:
    """Each query head's scores of the centroids of its head, anything where there is none.

    Args:
      arrays: see `cluster_mass`.
      queries: see `cluster_mass`.
      scale: see `cluster_mass`.
      soft_cap: see `cluster_mass`.

    Raises:
      KvjaxError: head counts or widths that do not fit.
    """
    centroid = loose(arrays)["centroid"]
    heads, count, dim = centroid.shape
    one = jnp.ones((1,), bool)
    check_queries(queries[None], one, heads, dim)
    scores = scaled(dot(centroid, group_rows(queries[None], one, heads)), scale, soft_cap)
    return jnp.swapaxes(scores, 1, 2).reshape(-1, count)
