"""Elements of packed pages, unpacked in the registers of a Pallas Triton program."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from kvjax.pallas_kernels.code_levels import FLOAT8, code_levels, factor_values
from kvjax.pallas_kernels.packed_bits import PLANES
from kvjax.pallas_kernels.packed_pages import PackedPages


def load_elements(
    pages: PackedPages, page: Any, kv_head: Any, offset: Any, columns: Any, mask: Any
) -> Any:
    """Read some slots of a page of one head.

    A byte that several tokens share is read by each of them: it is in the cache. 8-bit floats are
    taken as bytes, because not every GPU converts them.

    Args:
        pages: the pool, refs in place of arrays.
        page: which page.
        kv_head: which head.
        offset: int32 [tokens], slots of the page.
        columns: int32 [columns], channels.
        mask: bool [tokens, columns], what to read.

    Returns:
        float32 [tokens, columns], 0 where nothing is read.
    """
    _, _, page_size, dim = pages.shape

    def load(ref: Any, *at: Any) -> Any:
        return plgpu.load(ref.at[at], mask=mask)

    def codes() -> Any:
        if pages.bits == 8:
            whole = load(pages.planes["codes"], page, kv_head, offset[:, None], columns[None, :])
            if whole.dtype.name in FLOAT8:
                whole = lax.bitcast_convert_type(whole, jnp.uint8)
            return whole.astype(jnp.int32)
        code, below = None, 0
        for name, width in PLANES[pages.bits].items():
            plane = pages.planes[name]
            rows = plane.shape[2]
            row, shift = lax.rem(offset, rows), lax.div(offset, rows) * width
            field = load(plane, page, kv_head, row[:, None], columns[None, :]).astype(jnp.int32)
            field = ((field >> shift[:, None]) & (2**width - 1)) << below
            code = field if code is None else code | field
            below += width
        return code

    def factor(name: str, which: int) -> Any:
        ref = getattr(pages, name)
        at_page = jnp.zeros_like(page) if name in pages.shared else page
        at_head = kv_head if ref.shape[1] > 1 else jnp.zeros_like(kv_head)
        group = lax.div(offset, page_size // ref.shape[2])
        channel = lax.div(columns, dim // ref.shape[3])
        value = factor_values(load(ref, at_page, at_head, group[:, None], channel[None, :]))
        if pages.unit is None:
            return value
        # Masked like the rest: the page may be none.
        first, which_unit = jnp.zeros_like(offset), jnp.full_like(columns, which)
        unit = load(pages.unit, page, kv_head, first[:, None], which_unit[None, :])
        return value * factor_values(unit)

    value = code_levels(codes(), pages.planes["codes"].dtype.name, pages.centre)
    value = value * factor("scale", 0)
    if pages.middle is not None:
        value = value + factor("middle", 1)
    return jnp.where(mask, value, 0.0)
