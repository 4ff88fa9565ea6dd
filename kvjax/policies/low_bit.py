"""Keys at token precision: in full, or in 2, 3 or 4 bits a channel with the page as the group."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.errors import KvjaxError
from kvjax.formats.scales import to_float8
from kvjax.pallas_kernels import low_bit_scores
from kvjax.pallas_kernels.packed_bits import PLANES, pack, tokens_sharing_a_byte, unpack
from kvjax.policies.mass import BLOCK_TOKENS, dot, group_rows, scaled, softmax_mass
from kvjax.policies.sketch import check_finite, check_queries


@dataclasses.dataclass(frozen=True)
class ExactKeys:
    """The keys themselves: what is scored when keys are read from the store, and the yardstick.

    Attributes:
      block_tokens: tokens scored at once.

    Raises:
      KvjaxError: `block_tokens` is below 1.
    """

    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _check_block(self.block_tokens)

    def build(self, keys: Float[Array, "N Hkv P D"]) -> dict[str, Array]:
        """See `Sketch.build`: `keys`, [Hkv, N, P, D] in their own dtype."""
        check_finite(keys)
        return {"keys": jnp.asarray(keys).transpose(1, 0, 2, 3)}

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `Sketch.page_mass`; softmax is over tokens, and exact."""
        keys = arrays["keys"]
        kv_heads, num_pages, page_size, dim = keys.shape
        check_queries(queries, valid, kv_heads, dim)
        rows = group_rows(queries, valid, kv_heads)
        block = _block_pages(self.block_tokens, page_size, num_pages)

        def score_block(start: Int32[Array, ""]) -> Float32[Array, "Hkv B P R"]:
            here = lax.dynamic_slice_in_dim(keys, start, block, axis=1)
            scores = dot(here.reshape(kv_heads, -1, dim), rows)
            return scaled(scores, scale, soft_cap).reshape(kv_heads, block, page_size, -1)

        return softmax_mass(
            score_block,
            num_pages=num_pages,
            block_pages=block,
            kv_heads=kv_heads,
            valid=valid,
            query_heads=queries.shape[1],
            pages=pages,
        )

    def token_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        tokens: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq T"]:
        """Like `page_mass` for every token: the column sums that H2O and IMPRESS select by.

        Args:
          arrays: see `Sketch.page_mass`.
          queries: see `Sketch.page_mass`.
          valid: see `Sketch.page_mass`.
          tokens: int32 scalar, live tokens, 0 to T = N x P; the others get exactly 0.
          scale: see `Sketch.page_mass`.
          soft_cap: see `Sketch.page_mass`.

        Raises:
          KvjaxError: head counts or widths that do not fit.
        """
        keys = arrays["keys"]
        kv_heads, num_pages, page_size, dim = keys.shape
        single = {"keys": keys.reshape(kv_heads, num_pages * page_size, 1, dim)}
        return self.page_mass(single, queries, valid, tokens, scale=scale, soft_cap=soft_cap)

    def bytes_per_page(
        self, kv_heads: int, head_dim: int, page_size: int, item_bytes: int = 2
    ) -> int:
        """See `Sketch.bytes_per_page`; `item_bytes` is of the keys' dtype, 2 for bfloat16."""
        return kv_heads * page_size * head_dim * item_bytes


@dataclasses.dataclass(frozen=True)
class LowBitKeys:
    """Keys in 2 to 4 bits, per channel, the page as the group (KIVI's axis, arXiv:2402.02750).

    A channel of a page is `middle + step * (code - (2**bits - 1) / 2)`. Middle and step are
    float8_e4m3fn times a power of two that the page's head shares; the step is rounded up, so
    that with clip 1 no key is off by more than half a step. The middle takes the place of KIVI's
    minimum because it is the smaller number, and so the smaller error in 8 bits.

    Attributes:
      bits: 2, 3 or 4.
      clip: share of each channel's range that the codes cover, above 0, at most 1; keys outside
        take the outermost code.

    Raises:
      KvjaxError: one of them is none of these.
    """

    bits: int = 3
    clip: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in PLANES:
            raise KvjaxError(f"bits is {self.bits!r}: must be 2, 3 or 4")
        if not 0 < self.clip <= 1:
            raise KvjaxError(
                f"clip is {self.clip!r}: must be above 0 and at most 1, the share of a channel's "
                f"range that the codes cover"
            )

    def build(self, keys: Float[Array, "N Hkv P D"]) -> dict[str, Array]:
        """See `Sketch.build`.

        Magnitudes below 1e-30 count as 0.

        Returns:
          `codes` uint8 [Hkv, N, P x b / 8, D], the 2 low bits at 2 or 3 bits, or all 4; at 3 bits
          `top` uint8 [Hkv, N, P / 8, D], the third; `step` and `middle` float8_e4m3fn [Hkv, N, D];
          `unit` bfloat16 [Hkv, N, 2], the powers of two that step and middle are multiplied by.

        Raises:
          KvjaxError: P is no multiple of what shares a byte (4, 8, 2 tokens at 2, 3, 4 bits), or
            (outside jit) a key that is infinite or NaN.
        """
        check_finite(keys)
        self._check_page_size(keys.shape[2])
        pages = jnp.asarray(keys).astype(jnp.float32).transpose(1, 0, 2, 3)
        low, high = jnp.min(pages, axis=2), jnp.max(pages, axis=2)
        middle, middle_unit = _to_float8(low / 2 + high / 2, up=False)
        centre = middle.astype(jnp.float32) * middle_unit
        reach = jnp.maximum(high - centre, centre - low)  # half of what the codes must cover
        step, step_unit = _to_float8(reach * (2 * self.clip / (2**self.bits - 1)), up=True)
        # By the unit first: XLA divides by multiplying with the reciprocal, which may underflow.
        codes = (pages - centre[:, :, None, :]) / step_unit[:, :, None, :]
        width = step.astype(jnp.float32)[:, :, None, :]
        codes = codes / jnp.where(width == 0, 1, width)
        codes = jnp.round(codes + (2**self.bits - 1) / 2)
        codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)
        units = jnp.concatenate([step_unit, middle_unit], axis=-1)
        return {
            **pack(codes, self.bits),
            "step": step,
            "middle": middle,
            "unit": units.astype(jnp.bfloat16),
        }

    def keys(self, arrays: Mapping[str, Array]) -> Float32[Array, "N Hkv P D"]:
        """The keys that the sketch stands for, all at once.

        Args:
          arrays: what `build` made.
        """
        unit = arrays["unit"].astype(jnp.float32)
        step = arrays["step"].astype(jnp.float32) * unit[..., :1]
        middle = arrays["middle"].astype(jnp.float32) * unit[..., 1:]
        codes = unpack(arrays, self.bits).astype(jnp.float32)
        keys: Array = (codes - (2**self.bits - 1) / 2) * step[:, :, None] + middle[:, :, None]
        return keys.transpose(1, 0, 2, 3)

    def page_mass(
        self,
        arrays: Mapping[str, Array],
        queries: Float[Array, "S Hq D"],
        valid: Bool[Array, " S"],
        pages: Int32[Array, ""],
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> Float32[Array, "Hq N"]:
        """See `Sketch.page_mass`; softmax is over tokens, whose keys exist a few at a time."""
        kv_heads, num_pages, dim = arrays["step"].shape
        check_queries(queries, valid, kv_heads, dim)
        rows = group_rows(queries, valid, kv_heads)
        packed = {name: arrays[name] for name in (*PLANES[self.bits], "step", "middle", "unit")}
        counts = jnp.broadcast_to(jnp.clip(pages, 0, num_pages), (kv_heads,))
        scores = _scores(
            rows,
            packed,
            counts,
            bits=self.bits,
            scale=scale,
            soft_cap=soft_cap,
            # The kernels are made for the query heads of one token.
            implementation=None if len(valid) == 1 else "xla",
        )
        return _mass(scores.reshape(kv_heads, len(valid), -1, num_pages), valid)

    def bytes_per_page(self, kv_heads: int, head_dim: int, page_size: int) -> int:
        """See `Sketch.bytes_per_page`; raises as `build` does."""
        self._check_page_size(page_size)
        return kv_heads * (page_size * self.bits // 8 * head_dim + 2 * head_dim + 4)

    def _check_page_size(self, page_size: int) -> None:
        together = tokens_sharing_a_byte(self.bits)
        if page_size % together:
            raise KvjaxError(
                f"pages hold {page_size} tokens: {self.bits}-bit keys need a multiple of "
                f"{together}, which share a byte"
            )


def _scores(
    rows: Float[Array, "Hkv R D"],
    packed: Mapping[str, Array],
    counts: Int32[Array, " Hkv"],
    **options: Any,
) -> Float32[Array, "Hkv R N"]:
    """Log-sum-exp of the scores of each page's tokens; -inf for what is not among the first pages.

    Args:
      rows: [Hkv, R, D], queries of each KV head.
      packed: the sketch's arrays.
      counts: int32 [Hkv], live pages.
      options: of `low_bit_scores`.
    """

    @jax.custom_batching.custom_vmap
    def score(rows: Array, packed: Mapping[str, Array], counts: Array) -> Array:
        found = low_bit_scores(
            rows.reshape(1, -1, rows.shape[2]), packed, None, counts[None], **options
        )
        return found.reshape(*rows.shape[:2], -1)

    @score.def_vmap
    def score_each(
        size: int, batched: Any, rows: Array, packed: Mapping[str, Array], counts: Array
    ) -> tuple[Array, bool]:
        if not any(jax.tree.leaves(batched[1:])):  # many queries of one sequence
            heads, count, dim = rows.shape[1:]
            found = score(rows.swapaxes(0, 1).reshape(heads, size * count, dim), packed, counts)
            return found.reshape(heads, size, count, -1).swapaxes(0, 1), True

        def side_by_side(x: Array, is_batched: bool) -> Array:
            """The heads of several sequences as those of one."""
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        found = score(*jax.tree.map(side_by_side, (rows, packed, counts), tuple(batched)))
        return found.reshape(size, -1, *found.shape[1:]), True

    scores: Array = score(rows, packed, counts)
    return scores


def _mass(scores: Float32[Array, "Hkv S G N"], valid: Bool[Array, " S"]) -> Float32[Array, "Hq N"]:
    """Softmax over the pages that there are, summed over valid queries."""
    exists = scores != -jnp.inf
    weights = jnp.exp(scores - jnp.max(scores, axis=3, keepdims=True))
    weights = jnp.where(exists, weights, 0)
    share = weights / jnp.sum(weights, axis=3, keepdims=True)
    counted = exists & valid[None, :, None, None]
    mass = jnp.sum(jnp.where(counted, share, 0), axis=1)
    return mass.reshape(-1, scores.shape[3])


def _check_block(block_tokens: int) -> None:
    """Refuse blocks that hold no token."""
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise KvjaxError(f"block_tokens is {block_tokens!r}: must be an integer of at least 1")


def _block_pages(block_tokens: int, page_size: int, num_pages: int) -> int:
    """Pages scored at once."""
    return min(max(block_tokens // page_size, 1), num_pages)


def _to_float8(
    values: Float32[Array, "Hkv N D"], *, up: bool
) -> tuple[Float[Array, "Hkv N D"], Float32[Array, "Hkv N 1"]]:
    """Values as float8_e4m3fn times one power of two a row; `up` rounds towards plus infinity."""
    rounded, unit = to_float8(values[:, :, None], up=up)
    return rounded[:, :, 0], unit[:, :, 0]
