"""The formats that the benchmark of formats compares, as configurations of a cache."""

import dataclasses
import os

from kvjax.config import CacheConfig
from kvjax.formats import CALIBRATED, NAMED, Format, float8, int4, load_calibrated

BF16 = "bf16"


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to store pages; no format stores them in bf16."""

    format: Format | None
    page_size: int = 16

    def cache(self) -> CacheConfig:
        """The configuration; tokens that are not encoded are bf16."""
        return CacheConfig(format=self.format, page_size=self.page_size, dtype="bfloat16")


METHODS: dict[str, Method] = {
    BF16: Method(None),
    "fp8, scale 1": Method(float8(scale=1.0)),
    **{name: Method(NAMED[name]) for name in ("fp8", "fp8-products", "fp8-e5m2")},
    **{name: Method(NAMED[name]) for name in ("int8", "int8-int4", "int4")},
    "int4, pages of 32": Method(int4(), 32),
    "int4 keys, int3 values": Method(int4(value_bits=3)),
    "int4 keys, int3 values, pages of 32": Method(int4(value_bits=3, group=64), 32),
    **{name: Method(NAMED[name]) for name in ("int4-int2", "int3", "int2")},
    "int3, pages of 32": Method(int4(bits=3), 32),
    **{name: Method(NAMED[name], 32) for name in ("kivi4", "kivi2")},
}
"""By the name that tables have; int4, int3 and int2 have keys by channel and values by token."""


def calibrated(path: str | os.PathLike[str]) -> dict[str, Method]:
    """The formats that a calibration in a file makes."""
    return {name: Method(load_calibrated(path, name)) for name in CALIBRATED}
