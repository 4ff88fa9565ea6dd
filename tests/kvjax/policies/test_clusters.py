"""Clusters against k-means in plain NumPy, points that join, and what dead points hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.policies import Clustering
from kvjax.policies.clusters import cluster_mass
from kvjax.policies.entries import hold, loose

HEADS, DIM = 2, 8


def points_of(room, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(HEADS, room, DIM)).astype(np.float32) + 3


build = jax.jit(lambda clustering, *args: clustering.build(*args), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def join(clustering, arrays, index, point):
    """The arrays with one more point, its membership too, and the clusters it joined."""
    arrays, cluster, member = clustering.join(arrays, index, point)
    held = arrays["member"].at[:, index].set(member, mode="drop")
    return {**arrays, "member": held}, cluster


def built(clustering, points, count):
    return build(clustering, jnp.asarray(points), jnp.int32(count))


def plain_spherical(points, per_cluster, iterations):
    """One head's segment of centred points [T, D]: its clusters' members by the definition."""
    clusters = -(-len(points) // per_cluster)
    centroids = [points[j * len(points) // clusters] for j in range(clusters)]
    for _ in range(iterations):
        cosines = [[p @ c / (np.linalg.norm(c) or 1) for c in centroids] for p in points]
        member = np.argmax(cosines, axis=1)
        for j in range(clusters):
            if (member == j).any():
                centroids[j] = points[member == j].mean(axis=0)
    return member


@pytest.mark.parametrize("count", [48, 37, 20, 3, 1])
@pytest.mark.parametrize("iterations", [1, 4])
def test_clusters_are_those_of_k_means(count, iterations):
    """Three segments of 16, of which the last live one may be partly filled."""
    clustering = Clustering(per_cluster=4, segment=16, iterations=iterations)
    points = points_of(48)
    arrays = loose(built(clustering, points, count))
    assert arrays["centroid"].shape == (HEADS, 12, DIM)
    for head in range(HEADS):
        live = points[head, :count].astype(np.float64)
        for first in range(0, count, 16):
            here = live[first : first + 16]
            member = plain_spherical(here - live.mean(axis=0), 4, iterations)
            np.testing.assert_array_equal(arrays["member"][head, first : first + len(here)], member)
            for j in range(4):
                cluster = first // 4 + j
                assert arrays["size"][head, cluster] == (member == j).sum()
                if (member == j).any():
                    mean = here[member == j].mean(axis=0)
                    np.testing.assert_allclose(
                        arrays["centroid"][head, cluster].astype(np.float32), mean, rtol=1e-2
                    )
    assert np.asarray(arrays["size"]).sum(axis=1).tolist() == [count] * HEADS


def test_groups_far_apart_are_found():
    """8 directions, one seed in each and the rest in any order: each is a cluster."""
    rng = np.random.default_rng(3)
    direction = rng.permutation(np.repeat(np.arange(8), 7)).reshape(8, 7)
    direction = np.concatenate([np.arange(8)[:, None], direction], axis=1).ravel()
    points = np.eye(DIM)[direction] * 10 + rng.normal(size=(HEADS, 64, DIM)) * 0.1
    clustering = Clustering(per_cluster=8, segment=64)
    member = built(clustering, points.astype(np.float32), 64)["member"]
    np.testing.assert_array_equal(member, np.tile(direction, (HEADS, 1)))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_dead_points_have_no_effect(poison):
    clustering = Clustering(per_cluster=4, segment=16)
    clean = points_of(40)
    dirty = clean.copy()
    dirty[:, 21:] = poison
    found = built(clustering, dirty, 21)
    for name, array in built(clustering, clean, 21).items():
        wanted, got = np.asarray(array), np.asarray(found[name])
        if name == "member":
            wanted, got = wanted[:, :21], got[:, :21]
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_points_that_are_all_equal_cluster():
    clustering = Clustering(per_cluster=4, segment=16)
    arrays = built(clustering, np.full((HEADS, 16, DIM), 2.5, np.float32), 16)
    assert np.asarray(arrays["size"]).sum(axis=1).tolist() == [16, 16]
    centroid = loose(arrays)["centroid"].astype(jnp.float32)
    np.testing.assert_array_equal(centroid, jnp.full_like(centroid, 2.5))


@pytest.mark.parametrize("count", [0, 5, 8, 30])
def test_joining_keeps_means_sizes_and_members(count):
    """Whatever is joined, a centroid is the mean of its members and no point is lost."""
    room = 40
    clustering = Clustering(per_cluster=4, segment=16)
    points = points_of(room, seed=5)
    arrays = built(clustering, points, count)
    for index in range(count, room):
        arrays, cluster = join(clustering, arrays, jnp.int32(index), jnp.asarray(points[:, index]))
        assert (cluster == clustering.clusters_of(arrays["member"])[:, index]).all()
    full, none = join(clustering, arrays, jnp.int32(room), jnp.asarray(points[:, 0]))
    assert (none == arrays["size"].shape[1]).all()
    for name in arrays:
        np.testing.assert_array_equal(full[name], arrays[name])
    member = np.asarray(clustering.clusters_of(arrays["member"]))
    centroid = np.asarray(loose(arrays)["centroid"].astype(jnp.float32))
    for head in range(HEADS):
        for cluster, size in enumerate(np.asarray(arrays["size"][head])):
            mine = points[head][member[head] == cluster]
            assert len(mine) == size
            if size:
                np.testing.assert_allclose(centroid[head, cluster], mine.mean(axis=0), atol=0.05)


def test_a_joining_point_begins_a_cluster_or_goes_to_the_nearest_of_its_segment():
    points = np.zeros((HEADS, 32, DIM), np.float32)
    points[:, 16:24, :2] = np.repeat([[0, 9], [9, 0]], 4, axis=0)
    clustering = Clustering(per_cluster=4, segment=16)
    arrays = built(clustering, points, 24)
    found = []
    for index, point in enumerate([(-9, -9), (9, 9), (8, 0), (-1, -2), (0, 2), (3, 3)]):
        point = jnp.zeros((HEADS, DIM)).at[:, :2].set(jnp.array(point, jnp.float32))
        arrays, cluster = join(clustering, arrays, jnp.int32(24 + index), point)
        found.append(int(cluster[0]))
    assert found == [6, 7, 5, 6, 4, 7]


def test_mass_of_clusters_is_one_points_share():
    rng = np.random.default_rng(6)
    centroid = jnp.asarray(rng.normal(size=(2, 5, DIM)), jnp.bfloat16)
    size = np.array([[3, 0, 1, 7, 0], [1, 1, 1, 1, 1]])
    centroid = centroid.at[0, 1].set(jnp.nan)  # no cluster: what is there does not count
    arrays = hold({"centroid": centroid, "size": jnp.asarray(size, jnp.int32)})
    queries = rng.normal(size=(4, DIM)).astype(np.float32)
    run = functools.partial(cluster_mass, scale=0.5, soft_cap=3.0)
    mass = np.asarray(jax.jit(run)(arrays, jnp.asarray(queries)))
    for h in range(4):
        held = np.flatnonzero(size[h // 2])
        scores = np.asarray(centroid[h // 2].astype(jnp.float32))[held] @ queries[h] * 0.5
        weight = np.exp(3 * np.tanh(scores / 3))
        wanted = np.zeros(5)
        wanted[held] = weight / (weight * size[h // 2][held]).sum()
        np.testing.assert_allclose(mass[h], wanted, rtol=1e-4)


@pytest.mark.parametrize("field", ["per_cluster", "segment", "iterations"])
def test_numbers_that_cannot_be_are_refused(field):
    with pytest.raises(KvjaxError, match=f"{field} is 0"):
        Clustering(**{"per_cluster": 4, "segment": 16, field: 0})


def test_too_many_clusters_a_segment_are_refused():
    with pytest.raises(KvjaxError, match="must be at most 65536; give a smaller segment"):
        Clustering(1, 10**6).shape(10**6)
