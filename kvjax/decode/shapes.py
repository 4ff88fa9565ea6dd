"""Bucketed shapes: how many tokens, pages and rows a program is made for.

Programs are compiled for shapes. Rounding them up bounds how many are ever compiled. For one model,
page size, sampler and `max_new_tokens`, single prompts of up to 8 K tokens need at most 40 shapes,
batches of up to eight prompts of 2 K tokens at most 160. The number of tokens to draw counts by its
power of two; `stream`, which has no room for output, only by the pages it adds.
"""

import dataclasses
from collections.abc import Sequence

from kvjax.cache import check_pools
from kvjax.config import CacheConfig
from kvjax.errors import KvjaxError, PoolExhaustedError, is_integer
from kvjax.formats import Format, abstract_pages
from kvjax.models import ModelConfig
from kvjax.pallas_kernels import PackedPages
from kvjax.pallas_kernels.support import OPERATIONS, Implementation, supported
from kvjax.spec import INDEX_FLOAT4, KVSpec, LayerSpec, pages_for

SMALLEST_CHUNK = 16
"""Tokens of the smallest prefill chunk."""

ROUGH = 256
"""Chunks of up to so many tokens are powers of two; larger ones come in eighths of one."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static facts of a program; equal shapes share one program."""

    spec: KVSpec
    batch: int  # rows, a power of two
    chunk: int  # tokens a prefill chunk
    chunks: int  # chunks the token stream has room for: what fits the pages needed
    num_pages: int
    max_pages: int  # a row's block table, a power of two
    page_size: int
    room: int  # tokens the output has room for, a power of four
    attention: Implementation | None
    format: Format | None = None
    rings: bool = False  # layers with a window keep their last pages only


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def half_step(n: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is at least n: at most a third wasted.

    >>> [half_step(n) for n in (1, 5, 8, 9, 13, 261, 385)]
    [1, 6, 8, 12, 16, 384, 512]
    """
    whole = power_of_two(n)
    return whole * 3 // 4 if whole >= 4 and n <= whole * 3 // 4 else whole


def chunk_size(tokens: int, most: int) -> int:
    """Tokens a prefill chunk should have: as many as allowed, unless the last would be too empty.

    Args:
      tokens: of all prompts together, at least 1.
      most: the largest chunk allowed.

    >>> [chunk_size(n, 512) for n in (5, 100, 512, 600, 1400, 4100)]
    [16, 128, 512, 320, 512, 512]
    """
    count = -(-tokens // most)
    if 8 * count * most <= 9 * tokens:
        return most
    even = max(-(-tokens // count), SMALLEST_CHUNK)
    step = power_of_two(even) // (1 if even <= ROUGH else 8)
    return min(-(-even // step) * step, most)


def plan(
    config: ModelConfig,
    spec: KVSpec,
    lengths: Sequence[int],
    *,
    new_tokens: int,
    prefill_chunk: int,
    cache: CacheConfig,
) -> Shapes:
    """Choose shapes for a batch, or refuse it.

    Args:
      config: the model's.
      spec: what the cache stores.
      lengths: tokens of each prompt, all at least 1.
      new_tokens: most tokens to draw for each.
      prefill_chunk: most tokens a prefill chunk may have.
      cache: the caller's.

    Raises:
      KvjaxError: prompt and new tokens do not fit the model's context, `prefill_chunk` is not a
        multiple of `SMALLEST_CHUNK`, the attention that `cache` insists on cannot run, or a pool
        would be larger than programs can index.
      PoolExhaustedError: they do not fit the pool.
    """
    check_chunk(prefill_chunk)
    for row, length in enumerate(lengths):
        if length + new_tokens > config.max_context:
            raise KvjaxError(too_long(row, length, new_tokens, config.max_context))
    size, page_format = cache.page_size, cache.page_format
    if page_format is not None:
        page_format.check(spec, size)
        if page_format.products == "float8" and config.attn_soft_cap is not None:
            raise KvjaxError(
                "the format's products are 'float8' and the model caps its scores, which attention "
                "in float8 does not: take products='float32'"
            )
    check_attention(spec, cache)
    # The last token drawn is never written, so a row ends with one token less than it shows.
    held = [pages_for(length + max(new_tokens - 1, 0), size) for length in lengths]
    if cache.num_pages is not None and sum(held) > cache.num_pages:
        raise PoolExhaustedError(
            f"num_pages is {cache.num_pages}: the prompts and {new_tokens} new tokens each need "
            f"{sum(held)} pages of {size} tokens; raise num_pages to {sum(held)}, or ask for less",
            needed=sum(held),
            free=cache.num_pages,
        )
    pages = half_step(sum(held))
    num_pages = cache.num_pages or pages
    chunk, batch = chunk_size(sum(lengths), int(prefill_chunk)), power_of_two(len(lengths))
    # Of a cross-decoder's cache, what windows leave behind would be most.
    rings = config.cross_from is not None
    check_pools(spec, num_pages, size, batch=batch, window_chunk=chunk if rings else None)
    return Shapes(
        spec=spec,
        batch=batch,
        chunk=chunk,
        chunks=-(-pages * size // chunk),
        num_pages=num_pages,
        max_pages=power_of_two(max(held)),
        page_size=size,
        room=4 ** (-(-(max(new_tokens, 16) - 1).bit_length() // 2)),
        attention=cache.attention,
        format=page_format,
        rings=rings,
    )


def too_long(row: int, length: int, new_tokens: int, context: int) -> str:
    """What to say of a prompt that does not fit the context.

    Args:
      row: which.
      length: its tokens.
      new_tokens: to draw; 0 where a text is only read.
      context: tokens of the model's.
    """
    if not new_tokens:
        return f"the text has {length} tokens: the model's context is {context}; shorten it"
    what = "shorten the prompt" if length >= context else f"ask for at most {context - length}"
    return (
        f"prompt {row} has {length} tokens and max_new_tokens is {new_tokens}: the model's context "
        f"is {context} tokens; {what}"
    )


def check_chunk(prefill_chunk: int) -> None:
    """Refuse what is no size of a prefill chunk.

    Args:
      prefill_chunk: tokens.

    Raises:
      KvjaxError: it is no multiple of `SMALLEST_CHUNK`.
    """
    if not is_integer(prefill_chunk, SMALLEST_CHUNK) or prefill_chunk % SMALLEST_CHUNK:
        raise KvjaxError(
            f"prefill_chunk is {prefill_chunk!r}: must be a multiple of {SMALLEST_CHUNK} tokens"
        )


def check_attention(spec: KVSpec, cache: CacheConfig) -> None:
    """Refuse a named implementation here, rather than deep in a program that is being traced.

    Args:
      spec: what the cache stores.
      cache: the caller's.

    Raises:
      KvjaxError: it cannot run.
    """
    if cache.attention is None:
        return
    for operation in OPERATIONS:
        for number, layer in enumerate(spec.layers):
            if not _runs(operation, layer):
                continue
            _, key_dim, value_dim = layer.pool_dims
            index = operation == "lightning_indexer"
            halved = index and spec.index_dtype == INDEX_FLOAT4  # a row holds two tokens
            reason = supported(
                operation,
                cache.attention,
                head_dim=layer.index_dim if index else key_dim,
                v_head_dim=None if index else value_dim,
                page_size=cache.page_size // 2 if halved else cache.page_size,
                dtype="bfloat16" if index and spec.index_dtype else spec.dtype,
                pools=_packed_pools(spec, cache, number) if "attention" in operation else (),
            )
            if reason is not None:
                raise KvjaxError(
                    f"attention={cache.attention!r} cannot run: {reason}; pass attention=None to "
                    f"let kvjax choose"
                )


def _runs(operation: str, layer: LayerSpec) -> bool:
    """Whether a layer's attention is made of an operation, as far as named ones are checked."""
    if operation == "lightning_indexer":
        return layer.index_dim > 0
    if layer.kind == "retention":
        return False
    return (operation == "latent_attention") == (layer.kind == "mla")


def _packed_pools(spec: KVSpec, cache: CacheConfig, layer: int) -> tuple[PackedPages, ...]:
    """A layer's pools, abstract, where they are packed: not every kernel reads every packing."""
    chosen = None if cache.page_format is None else cache.page_format.layer(spec, layer)
    if chosen is None or cache.select is not None:  # over tiers they are unpacked before
        return ()
    heads, *dims = spec.layers[layer].pool_dims
    parts = zip((chosen.keys, chosen.values), dims, strict=True)
    return tuple(abstract_pages(packing, 2, heads, cache.page_size, dim) for packing, dim in parts)
