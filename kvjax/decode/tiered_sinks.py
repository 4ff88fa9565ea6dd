"""First pages of each row that a format leaves as they are, kept on the device for good.

Where all pages can leave in a format's bytes, so can these; what comes back is not read, but what
is here.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Sinks(NamedTuple):
    """One layer's, S pages of every row and KV head; S is 0 where there is no such format."""

    keys: Float[Array, "B S Hkv P D"]
    values: Float[Array, "B S Hkv P Dv"]


def of_prompt(
    sinks: Sinks,
    row: Int32[Array, ""],
    keys: Float[Array, "n Hkv P D"],
    values: Float[Array, "n Hkv P Dv"],
) -> Sinks:
    """Put a prompt's first pages there, full or not: one that is not is put again when it is.

    Args:
      sinks: before.
      row: int32, whose.
      keys: [n, Hkv, P, D], all pages of the prompt.
      values: [n, Hkv, P, Dv].
    """
    count = min(sinks.keys.shape[1], keys.shape[0])
    return Sinks(
        sinks.keys.at[row, :count].set(keys[:count]),
        sinks.values.at[row, :count].set(values[:count]),
    )


def filled(
    sinks: Sinks,
    page: Int32[Array, " B"],
    keys: Float[Array, "B Hkv P D"],
    values: Float[Array, "B Hkv P Dv"],
) -> Sinks:
    """Put the pages there that rows have just filled, if they are among the first.

    Args:
      sinks: before.
      page: int32 [B], which of its row each is; S and more are left out.
      keys: [B, Hkv, P, D].
      values: [B, Hkv, P, Dv].
    """
    row = jnp.arange(page.shape[0], dtype=jnp.int32)
    return Sinks(
        sinks.keys.at[row, page].set(keys, mode="drop"),
        sinks.values.at[row, page].set(values, mode="drop"),
    )


def instead(
    sinks: Sinks,
    rows: slice,
    ids: Int32[Array, "b Hkv K"],
    pages: tuple[Float[Array, "bK Hkv P D"], Float[Array, "bK Hkv P Dv"]],
) -> tuple[Float[Array, "bK Hkv P D"], Float[Array, "bK Hkv P Dv"]]:
    """Pages that came back, with those of `sinks` in place of them where these are the first.

    Args:
      sinks: of the layer.
      rows: of the batch, which the pages are of.
      ids: int32 [b, Hkv, K], which page of its row each is.
      pages: keys and values, page j of row b at b x K + j.
    """
    most = sinks.keys.shape[1]
    if most == 0:
        return pages
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None, None]
    head = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, None, :]
    which = ids.swapaxes(1, 2)  # [b, K, Hkv]
    is_sink: Bool[Array, "b K Hkv"] = which < most
    both: list[Array] = []
    for kept, came in zip((x[rows] for x in sinks), pages, strict=True):
        own = kept[row, jnp.minimum(which, most - 1), head]  # [b, K, Hkv, P, D]
        now = jnp.where(is_sink[..., None, None], own, came.reshape(own.shape))
        both.append(now.reshape(came.shape))
    return both[0], both[1]
