"""ShadowKV's low-rank keys: what all KV heads' keys have in common before their positions."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.errors import KvjaxError, check_integer
from kvjax.policies.entries import hold, loose, write_page
from kvjax.policies.index import live_keys, live_mass
from kvjax.policies.mass import BLOCK_TOKENS, dot, group_rows, scaled, softmax_mass
from kvjax.policies.sketch import check_finite, check_queries


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Keys without their rotation, of all KV heads side by side, in few dimensions.

    ShadowKV (arXiv:2410.21465, sections 3.1 and 4.1) keeps such keys to make those of chosen chunks
    again; it chooses by landmarks, which are `MeanKeys`. Here all keys are made again and scored,
    which reads little and computes much. The dimensions are those of greatest energy in the keys
    that the index was built of; later keys are projected on them. An index of no pages has no
    dimensions of its own, and must be built again to tell pages apart.

    Attributes:
      rank: dimensions kept, at most Hkv x D; None is the share of Hkv x D that the paper's 160 are
        of 8 heads of 128.
      frequencies: of the rotary embedding that the keys have, radians a token for each of D / 2
        pairs (i, i + D / 2); a sequence begins at position 0. Empty takes keys as they are.
      sharpen: what the rotary embedding multiplies keys by, 1 but under yarn.
      block_tokens: tokens made again and scored at once.

    Raises:
      KvjaxError: `rank` or `block_tokens` is no integer of at least 1, or `sharpen` is not above 0.
    """

    rank: int | None = None
    frequencies: tuple[float, ...] = ()
    sharpen: float = 1.0
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_integer("rank", self.rank, 1)
        check_integer("block_tokens", self.block_tokens, 1)
        if not self.sharpen > 0:
            raise KvjaxError(f"sharpen is {self.sharpen!r}: must be above 0")

    def build(self, keys: Float[Array, "N Hkv P D"], pages: Int32[Array, ""]) -> dict[str, Array]:
        """See `PageIndex.build`.

        Returns:
          `reduced.bfloat16` [1, N, P, rank], the bits of each token's coordinates, which all heads
          share; `basis` float32 [Hkv, D, rank].

        Raises:
          KvjaxError: `rank` is above Hkv x D, frequencies are not one a pair, or (outside jit) a
            live key that is infinite or NaN.
        """
        keys = live_keys(keys, pages)
        check_finite(keys)
        num_pages, heads, page_size, dim = keys.shape
        rank = self._rank(heads, dim)
        tokens = keys.transpose(0, 2, 1, 3).reshape(-1, heads, dim)
        tokens = self._turned(tokens, jnp.int32(0), back=True).reshape(-1, heads * dim)
        energy = jnp.matmul(tokens.T, tokens, precision=lax.Precision.HIGHEST)
        basis = jnp.linalg.eigh(energy)[1][:, ::-1][:, :rank]
        reduced = jnp.matmul(tokens, basis, precision=lax.Precision.HIGHEST)
        reduced = reduced.reshape(1, num_pages, page_size, rank).astype(jnp.bfloat16)
        return hold({"reduced": reduced, "basis": basis.reshape(heads, dim, rank)})

    def extend(
        self, arrays: Mapping[str, Array], page: Int32[Array, ""], keys: Float[Array, "Hkv P D"]
    ) -> dict[str, Array]:
        """See `PageIndex.extend`."""
        tokens = self._turned(keys.transpose(1, 0, 2), page * keys.shape[1], back=True)
        reduced = jnp.einsum(
            "phd,hdr->pr", tokens, arrays["basis"], precision=lax.Precision.HIGHEST
        )
        return write_page(arrays, page, {"reduced": reduced[None, None].astype(jnp.bfloat16)})

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "Hq D"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `PageIndex.page_mass`; softmax is over tokens, of the keys as made again."""
        reduced, basis = loose(arrays)["reduced"][0], arrays["basis"]
        num_pages, page_size, rank = reduced.shape
        heads, dim, _ = basis.shape
        one = jnp.ones((1,), bool)
        check_queries(queries[None], one, heads, dim)
        rows = group_rows(queries[None], one, heads).astype(jnp.float32)
        block = min(max(self.block_tokens // page_size, 1), num_pages)

        def score_block(start: Int32[Array, ""]) -> Float32[Array, "Hkv B P R"]:
            here = lax.dynamic_slice_in_dim(reduced, start, block, axis=0).reshape(-1, rank)
            keys = jnp.einsum(
                "tr,hdr->thd", here.astype(jnp.float32), basis, precision=lax.Precision.HIGHEST
            )
            keys = self._turned(keys, start * page_size, back=False)
            scores = dot(keys.transpose(1, 0, 2), rows)
            return scaled(scores, scale, soft_cap).reshape(heads, block, page_size, -1)

        mass = softmax_mass(
            score_block,
            num_pages=num_pages,
            block_pages=block,
            kv_heads=heads,
            valid=one,
            query_heads=queries.shape[0],
            pages=pages,
        )
        return live_mass(mass, pages)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.bytes_per_page`; raises as `build` does."""
        return float(2 * page_size * self._rank(kv_heads, head_dim))

    def scanned_bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> float:
        """See `PageIndex.scanned_bytes_per_page`: all of them."""
        return self.bytes_per_page(kv_heads, head_dim, page_size)

    def _rank(self, kv_heads: int, head_dim: int) -> int:
        channels = kv_heads * head_dim
        if self.rank is not None and self.rank > channels:
            raise KvjaxError(
                f"rank is {self.rank}: must be at most {channels}, the channels of {kv_heads} KV "
                f"heads of {head_dim}"
            )
        if len(self.frequencies) not in (0, head_dim // 2):
            raise KvjaxError(
                f"frequencies are {len(self.frequencies)}: must be one for each of the "
                f"{head_dim // 2} pairs of channels of head_dim {head_dim}, or none"
            )
        return max(channels * 5 // 32, 1) if self.rank is None else self.rank

    def _turned(
        self, tokens: Float[Array, "T Hkv D"], first: Int32[Array, ""], *, back: bool
    ) -> Float32[Array, "T Hkv D"]:
        """Tokens with the rotation of their positions from `first` on, or without it."""
        tokens = tokens.astype(jnp.float32)
        if not self.frequencies:
            return tokens
        positions = (first + jnp.arange(tokens.shape[0], dtype=jnp.int32)).astype(jnp.float32)
        angle = positions[:, None, None] * jnp.array(self.frequencies, jnp.float32)[None, None, :]
        factor = 1 / self.sharpen if back else self.sharpen
        cosine, sine = jnp.cos(angle) * factor, jnp.sin(angle) * (-factor if back else factor)
        one, other = jnp.split(tokens, 2, axis=2)
        return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], axis=2)
