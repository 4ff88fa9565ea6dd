"""How a token is stored: formats of pages in fewer bits than the model's own."""

from kvjax.formats.calibration import CALIBRATED, FormatCalibration, load_calibrated
from kvjax.formats.format import (
    NAMED,
    Format,
    LayerFormat,
    PagePacking,
    abstract_pages,
    empty_pages,
    float8,
    int4,
    int8,
    kivi,
    named_format,
)
from kvjax.formats.kvquant import KVQuantKeys, KVQuantValues
from kvjax.formats.packing import Packing
from kvjax.formats.static_float8 import StaticFloat8

__all__ = [
    "CALIBRATED",
    "NAMED",
    "Format",
    "FormatCalibration",
    "KVQuantKeys",
    "KVQuantValues",
    "LayerFormat",
    "Packing",
    "PagePacking",
    "StaticFloat8",
    "abstract_pages",
    "empty_pages",
    "float8",
    "int4",
    "int8",
    "kivi",
    "load_calibrated",
    "named_format",
]
