"""How a cache is configured: one frozen value, the same for every entry point and command."""

import dataclasses

from kvjax.errors import KvjaxError, check_integer, is_integer
from kvjax.formats import NAMED, Format, named_format
from kvjax.pallas_kernels import IMPLEMENTATIONS
from kvjax.pallas_kernels.support import Implementation
from kvjax.pallas_kernels.validate import FLOATS, PAGE_SIZES
from kvjax.policies.tiering import Place, Select, Window
from kvjax.spec import DEFAULT_PAGE_SIZE, INDEX_FLOAT4, INDEX_FLOAT8

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Other spellings that are taken for a dtype's name."""

_INDEX_DTYPES = {
    "fp8": INDEX_FLOAT8,
    "fp4": INDEX_FLOAT4,
    INDEX_FLOAT8: INDEX_FLOAT8,
    INDEX_FLOAT4: INDEX_FLOAT4,
}


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Where keys and values live while a model runs.

    Attributes:
      page_size: tokens a page, 8 to 128.
      num_pages: pages in the pool; None makes it as large as the call needs.
      dtype: of stored keys and values, "float32", "bfloat16" or "float16" (`SHORT_DTYPES` are taken
        too); None takes that of the model's matrices.
      index_dtype: of the keys that an indexer chooses tokens by (DeepSeek-V3.2): "float8_e4m3fn"
        ("fp8") or "float4_e2m1fn" ("fp4"), with a scale a token; None takes `dtype`.
      format: how full pages are stored, a `kvjax.formats.Format` or the name of one
        (`kvjax.formats.NAMED`); None stores them in `dtype`.
      attention: which attention implementation to insist on; None lets kvjax choose.
      select: which pages a decode step reads; None is all of them. The prompt itself is prefilled
        exactly, layer by layer.
      window: which of the pages that were read stay near; only with `place`. None is `Window()`.
      place: where pages live that are not near; only with `select`. None keeps all on the device.

    Raises:
      KvjaxError: a field is not what it must be.
    """

    page_size: int = DEFAULT_PAGE_SIZE
    num_pages: int | None = None
    dtype: str | None = None
    index_dtype: str | None = None
    format: Format | str | None = None
    attention: Implementation | None = None
    select: Select | None = None
    window: Window | None = None
    place: Place | None = None

    @property
    def page_format(self) -> Format | None:
        """`format`, its name looked up."""
        return named_format(self.format) if isinstance(self.format, str) else self.format

    def __post_init__(self) -> None:
        size, (smallest, largest) = self.page_size, PAGE_SIZES
        if not is_integer(size, smallest) or size > largest or size % 8:
            raise KvjaxError(
                f"page_size is {size!r}: must be a multiple of 8 tokens, {smallest} to {largest}; "
                f"{DEFAULT_PAGE_SIZE} is the default"
            )
        object.__setattr__(self, "page_size", int(size))
        if self.num_pages is not None:
            hint = ", or None to make as many as the call needs"
            pages = check_integer("num_pages", self.num_pages, 1, hint)
            object.__setattr__(self, "num_pages", pages)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
            if self.dtype not in FLOATS:
                raise KvjaxError(
                    f"dtype is {self.dtype!r}: must be one of {', '.join(FLOATS)}, or None"
                )
        if self.index_dtype is not None:
            if self.index_dtype not in _INDEX_DTYPES:
                raise KvjaxError(
                    f"index_dtype is {self.index_dtype!r}: must be one of "
                    f"{', '.join(_INDEX_DTYPES)}, or None"
                )
            object.__setattr__(self, "index_dtype", _INDEX_DTYPES[self.index_dtype])
        if isinstance(self.format, str):
            object.__setattr__(self, "format", self.page_format)
        if self.format is not None and not isinstance(self.format, Format):
            raise KvjaxError(
                f"format is {self.format!r}: must be a kvjax.formats.Format, one of "
                f"{', '.join(NAMED)}, or None"
            )
        if self.attention is not None and self.attention not in IMPLEMENTATIONS:
            raise KvjaxError(
                f"attention is {self.attention!r}: must be one of {', '.join(IMPLEMENTATIONS)}, or "
                f"None to let kvjax choose"
            )
        for name, kind in (("select", Select), ("window", Window), ("place", Place)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise KvjaxError(f"{name} is {value!r}: must be a kvjax.{kind.__name__}, or None")
        if self.place is not None and self.select is None:
            raise KvjaxError(
                "place is given and select is None: pages are fetched that a step selects; "
                "give select=kvjax.Select(), whose budget '100%' selects all"
            )
        if self.window is not None and self.place is None:
            raise KvjaxError(
                "window is given and place is None: without a place all pages stay near; give "
                "place=kvjax.Place(), or leave out window"
            )
        place = self.place
        if self.format is not None and self.select is not None and place is None:
            raise KvjaxError(
                "format and select are given and place is None: pages that steps select from are "
                "packed where they are not near; give place=kvjax.Place(), or leave out format"
            )
        if self.format is not None and place is not None and place.codec == "splitzip":
            raise KvjaxError(
                "place.codec is 'splitzip' and format is given: it encodes bfloat16 numbers, and "
                "pages of a format are bytes; take 'zstd', 'blosc' or 'none'"
            )
        if self.format is not None and place is not None and place.keep_generated:
            raise KvjaxError(
                "format is given and place.keep_generated is True: of a format only the "
                "prompt's pages are stored; leave out one of them"
            )
        if place is not None and place.hot_exact and self.format is None:
            raise KvjaxError(
                "place.hot_exact is True and format is None: without a format every page is exact; "
                "give a format, or leave out hot_exact"
            )
        if self.select is not None and self.num_pages is not None:
            raise KvjaxError(
                f"num_pages is {self.num_pages} and select is given: its pool has as many pages "
                f"as the window; leave out num_pages"
            )
