"""k-means, the same on every run: even seeds, sums by matrix products, the first of equals."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def k_means(
    points: Float32[Array, "T D"],
    count: Int32[Array, ""],
    started: Int32[Array, ""],
    clusters: int,
    iterations: int,
    *,
    spherical: bool,
) -> tuple[Float32[Array, "C D"], Int32[Array, " C"], Int32[Array, " T"]]:
    """Lloyd's iterations from evenly spaced points.

    Args:
      points: float32 [T, D].
      count: int32 scalar, how many points there are; the others must be finite, and do not count.
      started: int32 scalar, clusters that are seeded, at most C and `count`.
      clusters: C.
      iterations: passes, at least 1.
      spherical: whether a point belongs to the centroid of greatest cosine, not the nearest.

    Returns:
      Centroids, the mean of their points; a cluster that lost all of them keeps its last. Sizes: 0
      for clusters without a point. Each point's cluster, anything where there is no point.
    """
    slot = jnp.arange(clusters, dtype=jnp.int32)
    # Not slot * count // started: the product passes 2 ** 31 in a context of a few million.
    whole, rest = count // jnp.maximum(started, 1), count % jnp.maximum(started, 1)
    seeds = slot * whole + slot * rest // jnp.maximum(started, 1)
    live = jnp.arange(points.shape[0], dtype=jnp.int32) < count

    def assign(centroids: Float32[Array, "C D"]) -> Int32[Array, " T"]:
        scores = closeness(points, centroids, spherical=spherical)
        scores = jnp.where((slot < started)[None, :], scores, -jnp.inf)
        return jnp.argmax(scores, axis=1).astype(jnp.int32)

    def step(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        centroids, _, _ = carry
        member = assign(centroids)
        belongs = ((member[:, None] == slot[None, :]) & live[:, None]).astype(jnp.float32)
        means, sizes = cluster_means(points, belongs)
        return jnp.where(sizes[:, None] > 0, means, centroids), sizes.astype(jnp.int32), member

    first = points[jnp.clip(seeds, 0, points.shape[0] - 1)]
    blank = jnp.zeros(clusters, jnp.int32), jnp.zeros(points.shape[0], jnp.int32)
    found: tuple[Array, Array, Array] = lax.fori_loop(0, iterations, step, (first, *blank))
    return found


def cluster_means(
    points: Float32[Array, "T D"], belongs: Float32[Array, "T C"]
) -> tuple[Float32[Array, "C D"], Float32[Array, " C"]]:
    """The mean of each cluster's points, 0 for one that has none, and how many they are.

    Args:
      points: float32 [T, D].
      belongs: float32 [T, C], 1 where a point is of a cluster, else 0.
    """
    sizes = jnp.sum(belongs, axis=0)
    sums = jnp.matmul(belongs.T, points, precision=lax.Precision.HIGHEST)
    return sums / jnp.maximum(sizes, 1)[:, None], sizes


def closeness(
    points: Float32[Array, "*H T D"], centroids: Float32[Array, "*H C D"], *, spherical: bool
) -> Float32[Array, "*H T C"]:
    """How near each point is to each centroid: by its own cosine to them, or the negative square.

    Both up to what is the same for all of a point's centroids.

    Args:
      points: float32 [..., T, D].
      centroids: float32 [..., C, D].
      spherical: cosine, where a centroid of 0 has cosine 0; else distance.
    """
    inner = jnp.matmul(points, jnp.swapaxes(centroids, -1, -2), precision=lax.Precision.HIGHEST)
    squares = jnp.sum(centroids * centroids, axis=-1)[..., None, :]
    if spherical:
        return inner * lax.rsqrt(jnp.where(squares == 0, 1, squares))
    return inner - squares / 2
