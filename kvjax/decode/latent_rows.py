"""Pages of latents away from the pool: each token's row, cut into two halves of one size.

A layer with latents keeps two parts of a token, a latent and a rotated position key, which differ
in size. Where pages are stored or sent away, keys and values have one shape. So a token's row, all
that a query scores of it, is cut in two: the first half goes where keys go, the second where values
do. Layers may differ: a row has room for the largest one's parts, and zeros behind smaller ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.pallas_kernels.packed_pages import KeyPool, PackedPages, ValuePool
from kvjax.spec import KVSpec


@dataclasses.dataclass(frozen=True)
class LatentRows:
    """How pages of latents are kept elsewhere. Hashable, static under jit.

    Attributes:
      spec: of the cache; all of its layers keep latents.
      page_size: P, tokens a page.
    """

    spec: KVSpec
    page_size: int

    @property
    def width(self) -> int:
        """W: elements of half a row."""
        return -(-max(sum(layer.pool_dims[1:]) for layer in self.spec.layers) // 2)

    @property
    def page(self) -> jax.ShapeDtypeStruct:
        """[P, W]: half of each row of a page."""
        return jax.ShapeDtypeStruct((self.page_size, self.width), jnp.dtype(self.spec.dtype))

    def exact_pages(self, layer: int) -> tuple[int, int]:
        """First and last pages of a layer that need no reading: none."""
        del layer
        return 0, 0

    def halves(
        self, keys: Float[Array, "n 1 P Dr"], values: Float[Array, "n 1 P Dc"]
    ) -> tuple[Float[Array, "n 1 P W"], Float[Array, "n 1 P W"]]:
        """Both halves of pages' rows: of the latent and the position key, one after the other.

        Args:
          keys: [n, 1, P, Dr], rotated position keys.
          values: [n, 1, P, Dc], latents.
        """
        rows = self.padded(jnp.concatenate([values, keys], axis=-1))
        return rows[..., : self.width], rows[..., self.width :]

    def parts(
        self, layer: int, first: Float[Array, "n 1 P W"], second: Float[Array, "n 1 P W"]
    ) -> tuple[Float[Array, "n 1 P Dr"], Float[Array, "n 1 P Dc"]]:
        """Undo `halves`.

        Args:
          layer: whose pages they are.
          first: as `halves` gave them.
          second: likewise.
        """
        _, rope, rank = self.spec.layers[layer].pool_dims
        rows = jnp.concatenate([first, second], axis=-1)
        return rows[..., rank : rank + rope], rows[..., :rank]

    def padded(self, rows: Float[Array, "... D"]) -> Float[Array, "... D2"]:
        """Rows, or the queries that score them, with zeros up to 2 W elements."""
        rest = 2 * self.width - rows.shape[-1]
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, rest)])

    def put(
        self, layer: int, both: Float[Array, "two K 1 P W"], pools: tuple[KeyPool, ValuePool]
    ) -> tuple[KeyPool, ValuePool]:
        """Write pages into a layer's pools of position keys and latents, from the first on.

        Args:
          layer: whose.
          both: pages, as `halves` gave them.
          pools: of the layer, not packed.
        """
        keys, values = pools
        assert not isinstance(keys, PackedPages)
        assert not isinstance(values, PackedPages)
        new_keys, new_values = self.parts(layer, both[0], both[1])
        start = (0, 0, 0, 0)
        return (
            lax.dynamic_update_slice(keys, new_keys, start),
            lax.dynamic_update_slice(values, new_values, start),
        )
