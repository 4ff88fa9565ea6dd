"""MagicPIG's index: hashes that sample tokens with a probability that their attention decides."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.entries import write_page
from kvjax.policies.index import live_keys
from kvjax.policies.sketch import check_finite, check_queries

_PAGES_AT_ONCE = 64
_FLOOR = 1e-4  # the paper's code adds it to a probability before its logarithm


@dataclasses.dataclass(frozen=True)
class MagicPIG:
    """Tokens whose hash meets the query's in two tables at least (arXiv:2410.16179, section 4).

    A hash is the signs of K random projections (SimHash) of a key less the mean key; L tables have
    their own. The paper attends to the sampled tokens alone, and corrects by the probability that a
    token was sampled: `sampled` and `correction` are for that. To rank pages, hashes are all there
    is: a page's mass is its share of the tokens that a query head samples.

    Decoding over pages does not correct. Chosen pages are read whole, their tokens with probability
    1 and not w, so nothing is to be divided by; and a logit that differs from token to token, which
    sampled tokens would need, is no argument of the attention kernels.

    New pages are hashed with the mean of the keys that the index was built of.

    Attributes:
      bits: K, projections a table, 1 to 16.
      tables: L.
      seed: of the projections.

    Raises:
      KvjaxError: one of them is out of range.
    """

    bits: int = 10
    tables: int = 150
    seed: int = 0

    def __post_init__(self) -> None:
        if check_integer("bits", self.bits, 1) > 16:
            raise KvjaxError(f"bits is {self.bits!r}: must be 1 to 16, since a hash is 2 bytes")
        check_integer("tables", self.tables, 1)
        check_integer("seed", self.seed, 0)

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`.

        Returns:
          `codes` uint16 [Hkv, N, P, L]; `centre` float32 [Hkv, D].

        Raises:
          KvjaxError: (outside jit) a live key that is infinite or NaN.
        """
        keys = live_keys(keys, pages)
        check_finite(keys)
        keys = keys.astype(jnp.float32)
        tokens = jnp.clip(pages, 0, keys.shape[0]) * keys.shape[2]
        centre = jnp.sum(keys, axis=(0, 2)) / jnp.maximum(tokens, 1).astype(jnp.float32)
        codes = lax.map(
            lambda page: self._hash(page - centre[:, None, :]), keys, batch_size=_PAGES_AT_ONCE
        )
        return {"codes": codes.transpose(1, 0, 2, 3), "centre": centre}

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`."""
        codes = self._hash(keys.astype(jnp.float32) - arrays["centre"][:, None, :])
        return write_page(arrays, page, {"codes": codes[:, None]})

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; all 0 for a head that samples nothing. Scores have no part."""
        tokens = jnp.sum(self.sampled(arrays, queries, pages).astype(jnp.float32), axis=2)
        return tokens / jnp.maximum(jnp.sum(tokens, axis=1, keepdims=True), 1)

    def sampled(
        self, arrays: Mapping[str, Array], queries: Float[Array, "Hq D"], pages: Int32[Array, ""]
    ) -> Bool[Array, "Hq N P"]:
        """Which tokens of live pages each query head samples.

        Args:
          arrays: what `build` or `extend` made.
          queries: [Hq, D], position encoding applied.
          pages: int32 scalar, live pages.

        Raises:
          KvjaxError: head counts or widths that do not fit.
        """
        codes = arrays["codes"]
        heads, num_pages, page_size, _ = codes.shape
        check_queries(queries[None], jnp.ones((1,), bool), heads, arrays["centre"].shape[1])
        asked = self._hash(queries.astype(jnp.float32)).reshape(heads, -1, 1, 1, self.tables)
        meet = jnp.sum((codes[:, None] == asked).astype(jnp.int32), axis=4)
        live = jnp.arange(num_pages, dtype=jnp.int32) < pages
        found = (meet >= 2) & live[None, None, :, None]
        return found.reshape(-1, num_pages, page_size)

    def correction(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        keys: Float[Array, "Hkv M P D"],
    ) -> Float32[Array, "Hq M P"]:
        """What is subtracted from a sampled token's logit: the log of its probability.

        A projection's sign is the same for both with p = 1 - angle / pi, a table's hash with
        u = p^K, and two tables' or more of L with w = 1 - (1 - u)^L - L u (1 - u)^(L - 1); the
        correction is log(w + 1e-4) (section 4.3 and the authors' code).

        Args:
          arrays: what `build` or `extend` made.
          queries: [Hq, D].
          keys: [Hkv, M, P, D], the keys of any M pages, for example those that were chosen.
        """
        heads, _, _, dim = keys.shape
        keys = keys.astype(jnp.float32) - arrays["centre"][:, None, None, :]
        asked = queries.astype(jnp.float32).reshape(heads, -1, dim)
        inner = jnp.einsum("hgd,hmpd->hgmp", asked, keys, precision=lax.Precision.HIGHEST)
        norms = jnp.linalg.norm(asked, axis=2)[:, :, None, None]
        norms = norms * jnp.linalg.norm(keys, axis=3)[:, None]
        cosine = jnp.clip(inner / jnp.where(norms == 0, 1, norms), -1, 1)
        same = (1 - jnp.arccos(cosine) / np.pi) ** self.bits
        none = (1 - same) ** self.tables
        one = self.tables * same * (1 - same) ** (self.tables - 1)
        return jnp.log(1 - none - one + _FLOOR).reshape(-1, *keys.shape[1:3])

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`."""
        return float(kv_heads * page_size * self.tables * 2)

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all, though a hash table would find its own."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)

    def _hash(self, vectors: Float32[Array, "*rows D"]) -> UInt16[Array, "*rows L"]:
        """Each vector's hash in every table."""
        planes = jnp.asarray(_projections(vectors.shape[-1], self.bits, self.tables, self.seed))
        signs = jnp.matmul(vectors, planes, precision=lax.Precision.HIGHEST) >= 0
        signs = signs.reshape(*vectors.shape[:-1], self.tables, self.bits).astype(jnp.uint16)
        places = jnp.left_shift(jnp.uint16(1), jnp.arange(self.bits, dtype=jnp.uint16))
        places = jnp.broadcast_to(places, signs.shape)
        return jnp.sum(signs * places, axis=-1, dtype=jnp.uint16)


@functools.cache
def _projections(dim: int, bits: int, tables: int, seed: int) -> Float32[np.ndarray, "D LK"]:
    """Random normal directions, table after table; the same for every layer and head."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((dim, tables * bits), np.float32)
