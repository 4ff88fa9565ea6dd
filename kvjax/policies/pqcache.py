"""PQCache's index: keys as codes of a product quantizer that is fitted to the context."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.entries import write_page
from kvjax.policies.index import live_keys, mass_of_scores
from kvjax.policies.k_means import closeness, k_means
from kvjax.policies.mass import scaled
from kvjax.policies.sketch import check_finite, check_queries


@dataclasses.dataclass(frozen=True)
class PQCache:
    """Each key is, in each of a few parts of its channels, the nearest of 2^b (arXiv:2407.12820).

    Section 3.2: codebooks are fitted by k-means to the keys of the context, but for the first ones,
    for each KV head and part on its own. A look-up scores the codebooks and adds up by code. Keys
    that come later get the nearest codes; codebooks stay as they are.

    Attributes:
      subspaces: m, parts of the channels; must divide head_dim.
      bits: b, bits of a code, 1 to 8.
      first: tokens at the start that are not fitted, since they attend unlike the others.
      iterations: passes of k-means; the paper has 3 to 300, as many as its time allows.

    Raises:
      KvjaxError: one of them is out of range.
    """

    subspaces: int = 2
    bits: int = 6
    first: int = 32
    iterations: int = 20

    def __post_init__(self) -> None:
        check_integer("subspaces", self.subspaces, 1)
        check_integer("iterations", self.iterations, 1)
        check_integer("first", self.first, 0)
        if check_integer("bits", self.bits, 1) > 8:
            raise KvjaxError(f"bits is {self.bits!r}: must be 1 to 8, since a code is a byte")

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`.

        A context of `first` tokens or fewer is fitted with all of them. Without any, codebooks are
        0, so that nothing is told apart until the index is built again.

        Returns:
          `codes` uint8 [Hkv, N, P, m]; `codebook` float32 [Hkv, m, 2^b, D / m].

        Raises:
          KvjaxError: parts that do not divide head_dim, or (outside jit) a live key that is
            infinite or NaN.
        """
        keys = live_keys(keys, pages)
        check_finite(keys)
        num_pages, heads, page_size, dim = keys.shape
        self._check_dim(dim)
        tokens = jnp.clip(pages, 0, num_pages) * page_size
        skipped = jnp.where(tokens > self.first, self.first, 0)
        count = tokens - skipped
        started = jnp.minimum(count, 2**self.bits)

        def fit(points: Float32[Array, "T part"]) -> tuple[Array, Array]:
            fitted = jnp.roll(points, -skipped, axis=0)
            centroids, _, _ = k_means(
                fitted, count, started, 2**self.bits, self.iterations, spherical=False
            )
            return centroids, _nearest(points, centroids)

        codebook, codes = lax.map(fit, self._parts(keys.transpose(1, 0, 2, 3)))
        return {
            "codes": self._by_page(codes, page_size),
            "codebook": codebook.reshape(heads, self.subspaces, 2**self.bits, -1),
        }

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`; the nearest codes of the codebooks there are."""
        codebook = arrays["codebook"]
        codebook = codebook.reshape(-1, *codebook.shape[2:])
        codes = jax.vmap(_nearest)(self._parts(keys[:, None]), codebook)
        return write_page(arrays, page, {"codes": self._by_page(codes, keys.shape[1])})

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; softmax is over tokens, as their codes have them."""
        codes, codebook = arrays["codes"], arrays["codebook"]
        heads, num_pages, page_size, parts = codes.shape
        check_queries(queries[None], jnp.ones((1,), bool), heads, parts * codebook.shape[3])
        asked = queries.astype(jnp.float32).reshape(heads, -1, parts, codebook.shape[3])
        table = jnp.einsum("hgms,hmcs->hmcg", asked, codebook, precision=lax.Precision.HIGHEST)
        scores = jnp.zeros((heads, num_pages * page_size, asked.shape[1]), jnp.float32)
        for part in range(parts):
            index = codes[..., part].astype(jnp.int32).reshape(heads, -1, 1)
            scores = scores + jnp.take_along_axis(table[:, part], index, axis=1)
        scores = scaled(scores, scale, soft_cap).reshape(heads, num_pages, page_size, -1)
        return mass_of_scores(scores, pages)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`: a byte a code; codebooks do not grow."""
        self._check_dim(head_dim)
        return float(kv_heads * page_size * self.subspaces)

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all of them."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)

    def _check_dim(self, head_dim: int) -> None:
        if head_dim % self.subspaces:
            raise KvjaxError(
                f"subspaces is {self.subspaces}: must divide the keys' head_dim {head_dim}"
            )

    def _parts(self, keys: Float[Array, "Hkv N P D"]) -> Float32[Array, "rows T part"]:
        """The tokens' channels of each head and part, Hkv x m rows."""
        heads, num_pages, page_size, dim = keys.shape
        parts = keys.astype(jnp.float32)
        parts = parts.reshape(heads, num_pages * page_size, self.subspaces, dim // self.subspaces)
        return parts.transpose(0, 2, 1, 3).reshape(heads * self.subspaces, -1, parts.shape[3])

    def _by_page(self, codes: UInt8[Array, "rows T"], page_size: int) -> UInt8[Array, "Hkv N P m"]:
        """Codes as the index has them."""
        codes = codes.reshape(-1, self.subspaces, codes.shape[1] // page_size, page_size)
        return codes.transpose(0, 2, 3, 1)


def _nearest(
    points: Float32[Array, "T part"], centroids: Float32[Array, "C part"]
) -> UInt8[Array, " T"]:
    """The nearest centroid of each point, the first of equals."""
    return jnp.argmax(closeness(points, centroids, spherical=False), axis=1).astype(jnp.uint8)
