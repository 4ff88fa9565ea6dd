"""The order in which pages lie in a segment's files, if it is not that of their tokens.

Pages that are near in meaning are often read together, and neighbours in a file come in one read.
Where each page lies is kept with the segment as a small array, by which pages are found: who reads
them names them as ever.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Shaped

from kvjax.storage.layout import Grid, Layout
from kvjax.storage.stored_array import StoredArray

PAGE_PLACES = "page-places"
"""Name of the array: int32 [layer groups, head groups, N], the place of each page in its file."""


def near_together(
    keys: Shaped[np.ndarray, "L N H P D"], layout: Layout
) -> Int32[np.ndarray, "G J N"]:
    """Places so that the next page is always the one of nearest mean key that had none yet.

    They start with page 0, and costs N^2 D multiplications a layer and KV head.

    Args:
      keys: of all layers.
      layout: what one read brings: its layers and KV heads are ordered together.

    Returns:
      The place of each page, for each group of layers and each group of heads.
    """
    layers, pages, heads, _, dim = keys.shape
    means = np.nan_to_num(keys.astype(np.float32).mean(axis=3))
    grouped = means.reshape(
        layers // layout.layers, layout.layers, pages, heads // layout.heads, layout.heads, dim
    )
    points = grouped.transpose(0, 3, 2, 1, 4, 5).reshape(
        -1, pages, layout.layers * layout.heads * dim
    )
    # The nearest x to p has the least |x|^2 / 2 - x.p; what has a place has none left.
    cost = (points * points).sum(axis=2) / 2
    order = np.zeros((len(points), pages), np.int32)
    group = np.arange(len(points))
    for place in range(1, pages):
        last = order[:, place - 1]
        cost[group, last] = np.inf
        inner = np.matmul(points, points[group, last][..., None])[..., 0]
        order[:, place] = np.argmin(cost - inner, axis=1)
    places = np.argsort(order, axis=1).astype(np.int32)
    return places.reshape(layers // layout.layers, heads // layout.heads, pages)


def are_places(places: np.ndarray, grid: Grid, arrays: Sequence[StoredArray]) -> bool:
    """Whether this gives every page of every group a place of its own in its folder.

    Args:
      places: what is said to be places.
      grid: of the segment.
      arrays: which pages lie in which folder.
    """
    layer_groups, head_groups, _, pages = grid.units
    if places.dtype != np.int32 or places.shape != (layer_groups, head_groups, pages):
        return False
    first = 0
    for array in arrays:
        here = np.sort(places[:, :, first : first + array.pages], axis=2)
        inside = (here >= 0).all() and (here < array.of).all()
        if not inside or (np.diff(here, axis=2) == 0).any():
            return False
        first += array.pages
    return True
