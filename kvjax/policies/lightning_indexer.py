"""A lightning indexer: a small attention, learned, that tells which tokens a layer attends to.

DeepSeek's sparse attention (DeepSeek-V3.2-Exp, section 2.1) scores a token s for a query t by
I = sum over heads j of w[t, j] * ReLU(q[t, j] . k[s]), in few dimensions and with one key a token.
Theirs reads a layer's input; this one reads what attention reads, the queries and keys of all heads
before their rotation, so that models that have none get one, built of the keys in a cache.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.errors import KvjaxError
from kvjax.formats.constant import Constant
from kvjax.formats.scales import real, to_float8
from kvjax.pallas_kernels.packed_bits import float8_values
from kvjax.policies.entries import hold, write_page
from kvjax.policies.index import live_keys, mass_of_scores
from kvjax.policies.sketch import check_finite, check_queries

_EPSILON = 1e-6


class IndexerWeights(NamedTuple):
    """What one layer's indexer has learned; a pytree. J heads of Di dimensions."""

    queries: Float[Array, "HqD J Di"]
    keys: Float[Array, "HkvD Di"]
    weights: Float[Array, "HqD J"]
    bias: Float[Array, " J"]  # of the weights
    scale: Float[Array, " Di"]  # of the keys' LayerNorm
    shift: Float[Array, " Di"]


def initial_weights(
    key: Array, *, query_heads: int, kv_heads: int, head_dim: int, heads: int, dim: int
) -> IndexerWeights:
    """Random weights to begin with.

    Args:
      key: a PRNG key.
      query_heads: Hq of the layer.
      kv_heads: Hkv.
      head_dim: D.
      heads: J of the indexer.
      dim: Di.
    """
    wide, narrow = query_heads * head_dim, kv_heads * head_dim
    ask, answer, weigh = jax.random.split(key, 3)
    return IndexerWeights(
        queries=jax.random.normal(ask, (wide, heads, dim)) * wide**-0.5,
        keys=jax.random.normal(answer, (narrow, dim)) * narrow**-0.5,
        weights=jax.random.normal(weigh, (wide, heads)) * 0.1 * wide**-0.5,
        bias=jnp.ones((heads,), jnp.float32),
        scale=jnp.ones((dim,), jnp.float32),
        shift=jnp.zeros((dim,), jnp.float32),
    )


def index_keys(
    weights: IndexerWeights, keys: Float[Array, "T Hkv D"], angles: Float32[Array, "T pairs"]
) -> Float32[Array, "T Di"]:
    """The one key that every token has.

    Args:
      weights: the layer's.
      keys: [T, Hkv, D], before their rotation.
      angles: float32 [T, pairs], by which the first pairs (i, i + pairs) of a key are turned.
    """
    made = _product(keys.reshape(keys.shape[0], -1).astype(jnp.float32), weights.keys)
    made = made - jnp.mean(made, axis=1, keepdims=True)
    made = made * lax.rsqrt(jnp.mean(made * made, axis=1, keepdims=True) + _EPSILON)
    made = made * weights.scale[None] + weights.shift[None]
    return turned(made[:, None], angles)[:, 0]


def index_queries(
    weights: IndexerWeights, queries: Float[Array, "T Hq D"], angles: Float32[Array, "T pairs"]
) -> tuple[Float32[Array, "T J Di"], Float32[Array, "T J"]]:
    """What a token asks with, and how much each head of it counts, J and Di accounted for.

    Args:
      weights: the layer's.
      queries: [T, Hq, D], before their rotation.
      angles: as of `index_keys`.
    """
    flat = queries.reshape(queries.shape[0], -1).astype(jnp.float32)
    _, heads, dim = weights.queries.shape
    asked = _product(flat, weights.queries.reshape(flat.shape[1], -1))
    counts = _product(flat, weights.weights) + weights.bias[None]
    return turned(asked.reshape(-1, heads, dim), angles), counts * (heads * dim) ** -0.5


def index_scores(
    asked: Float32[Array, "T J Di"], counts: Float32[Array, "T J"], keys: Float32[Array, "S Di"]
) -> Float32[Array, "T S"]:
    """Every token's score for every query; softmax of them stands for the layer's attention.

    Args:
      asked: float32 [T, J, Di], of `index_queries`.
      counts: float32 [T, J].
      keys: float32 [S, Di], of `index_keys`.
    """
    products = jnp.einsum("tjd,sd->tjs", asked, keys, precision=lax.Precision.HIGHEST)
    scores: Array = jnp.einsum(
        "tjs,tj->ts", jax.nn.relu(products), counts, precision=lax.Precision.HIGHEST
    )
    return scores


def turned(
    heads: Float32[Array, "T H D"], angles: Float32[Array, "T pairs"]
) -> Float32[Array, "T H D"]:
    """Vectors whose first pairs (i, i + pairs) are turned; the dimensions after them stay."""
    pairs = angles.shape[1]
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, other, rest = jnp.split(heads, [pairs, 2 * pairs], axis=2)
    return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine, rest], axis=2)


@dataclasses.dataclass(frozen=True)
class LayerIndexer:
    """One layer's indexer as what pages are chosen by: a page's mass is that of its tokens.

    All heads have the same mass, so every KV head chooses the same pages, as in DSA. Index keys
    are kept in float8_e4m3fn, times a power of two that a page shares.

    Attributes:
      learned: the six arrays of `IndexerWeights`; of a `form` their shapes alone.
      frequencies: of the rotary embedding that keys have, radians a token for each of D / 2 pairs
        (i, i + D / 2).
      sharpen: what the rotary embedding multiplies keys and queries by, 1 but under yarn.
    """

    learned: tuple[Constant | jax.ShapeDtypeStruct | Array, ...]
    frequencies: tuple[float, ...]
    sharpen: float = 1.0

    @classmethod
    def of(
        cls, weights: IndexerWeights, frequencies: tuple[float, ...], sharpen: float
    ) -> "LayerIndexer":
        """What was learned, to choose by.

        Args:
          weights: arrays.
          frequencies: see the class.
          sharpen: see the class.
        """
        return cls(tuple(Constant(np.asarray(each)) for each in weights), frequencies, sharpen)

    @property
    def weights(self) -> IndexerWeights:
        """As arrays."""
        held = (each.values if isinstance(each, Constant) else each for each in self.learned)
        return IndexerWeights(*map(jnp.asarray, held))

    @property
    def form(self) -> "LayerIndexer":
        """What a program is compiled for, whose arguments the weights are. Hashable."""
        shapes = (jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in self.learned)
        return dataclasses.replace(self, learned=tuple(shapes))

    def with_weights(self, weights: IndexerWeights) -> "LayerIndexer":
        """A form with weights to choose by, for use inside a program.

        Args:
          weights: arrays.
        """
        return dataclasses.replace(self, learned=tuple(weights))

    @property
    def dim(self) -> int:
        """Di, dimensions of an index key."""
        return self.learned[1].shape[1]

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`.

        Returns:
          `keys.float8_e4m3fn` [1, N, P, Di], the bits of the index keys, and `unit` float32 [1, N],
          what a page's are multiplied by.

        Raises:
          KvjaxError: KV heads of another number or size than those that were learned of, or
            (outside jit) a live key that is infinite or NaN.
        """
        keys = live_keys(keys, pages)
        check_finite(keys)
        num_pages, heads, page_size, dim = keys.shape
        self._check(heads * dim)
        tokens = keys.transpose(0, 2, 1, 3).reshape(-1, heads, dim)
        made = self._keys(tokens, jnp.int32(0)).reshape(num_pages, page_size, -1)
        return hold(_entries(made))

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`."""
        made = self._keys(keys.transpose(1, 0, 2), page * keys.shape[1])
        return write_page(arrays, page, _entries(made[None]))

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
        position: Int32[Array, ""] | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; scale and cap are part of what was learned.

        Args:
          arrays: see `PageIndex.page_mass`.
          queries: see `PageIndex.page_mass`.
          pages: see `PageIndex.page_mass`.
          scale: has no part.
          soft_cap: has no part.
          position: int32 scalar, the queries' position, tokens; None is that of the first token
            after the pages.
        """
        codes = arrays["keys.float8_e4m3fn"][0].astype(jnp.int32)
        keys: Array = float8_values(codes) * arrays["unit"][0, :, None, None]
        num_pages, page_size, dim = keys.shape
        heads = queries.shape[0]
        wide = self.learned[0].shape[0]
        check_queries(queries[None], jnp.ones((1,), bool), 1, wide // heads)
        where = pages * page_size if position is None else position
        plain = self._plain(queries[None], where)
        asked, counts = index_queries(self.weights, plain, self._angles(where[None]))
        scores = index_scores(asked, counts, keys.reshape(-1, dim))
        mass = mass_of_scores(scores.reshape(1, num_pages, page_size, 1), pages)
        return jnp.broadcast_to(mass, (heads, num_pages))

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`."""
        return float(page_size * self.dim + 4)

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all of them."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)

    def _check(self, channels: int) -> None:
        learned = self.learned[1].shape[0]
        if channels != learned:
            raise KvjaxError(
                f"keys have {channels} channels in all KV heads, and this indexer was learned of "
                f"{learned}: it is of another model; distil one with `kvjax distill indexer`"
            )

    def _keys(
        self, tokens: Float[Array, "T Hkv D"], first: Int32[Array, ""]
    ) -> Float32[Array, "T Di"]:
        """Index keys of rotated keys at positions from `first` on."""
        positions = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return index_keys(self.weights, self._plain(tokens, positions), self._angles(positions))

    def _plain(
        self, heads: Float[Array, "T H D"], positions: Int32[Array, "..."]
    ) -> Float32[Array, "T H D"]:
        """Vectors without the rotation of their positions."""
        radians = jnp.array(self.frequencies, jnp.float32)
        angles = positions.reshape(-1, 1).astype(jnp.float32) * radians[None]
        return turned(heads.astype(jnp.float32), -angles) / self.sharpen

    def _angles(self, positions: Int32[Array, " T"]) -> Float32[Array, "T pairs"]:
        return index_angles(self.frequencies, self.dim, positions)


def index_angles(
    frequencies: tuple[float, ...], dim: int, positions: Int32[Array, " T"]
) -> Float32[Array, "T pairs"]:
    """Angles by which half of an index key is turned: some of the model's own frequencies, evenly.

    Args:
      frequencies: of the model's keys, radians a token.
      dim: Di.
      positions: int32 [T], tokens.
    """
    pairs = min(dim // 4, len(frequencies))
    chosen = [frequencies[i * len(frequencies) // pairs] for i in range(pairs)] if pairs else []
    return positions.astype(jnp.float32)[:, None] * jnp.array(chosen, jnp.float32)[None, :]


def _entries(keys: Float32[Array, "n P Di"]) -> dict[str, Array]:
    """Pages' index keys as an index has them, [1, n, ...]."""
    codes, unit = to_float8(keys[:, None], up=False)
    return {"keys": codes[:, 0][None], "unit": unit[:, 0, 0, 0][None]}


def rounded(keys: Float32[Array, "T Di"], page_size: int) -> Float32[Array, "T Di"]:
    """Index keys as an index of their pages would give them back.

    Args:
      keys: float32 [T, Di], of whole pages.
      page_size: P, tokens a page.
    """
    paged = keys.reshape(-1, 1, page_size, keys.shape[1])
    return real(*to_float8(paged, up=False)).reshape(keys.shape)


def _product(rows: Float32[Array, "T a"], matrix: Float[Array, "a b"]) -> Float32[Array, "T b"]:
    return jnp.matmul(rows, matrix, precision=lax.Precision.HIGHEST)
