"""How a token is stored: formats of pages in fewer bits than the model's own."""

from kvjax.formats.format import (
    NAMED,
    Format,
    LayerFormat,
    PagePacking,
    float8,
    int4,
    int8,
    kivi,
    named_format,
)
from kvjax.formats.packing import Packing

__all__ = [
    "NAMED",
    "Format",
    "LayerFormat",
    "Packing",
    "PagePacking",
    "float8",
    "int4",
    "int8",
    "kivi",
    "named_format",
]
