"""What a model's keys and values are like, measured once, and the formats that are made of it."""

import dataclasses
import os
from typing import Any

import numpy as np

from kvjax.errors import KvjaxError, check_integer
from kvjax.formats.constant import Constant
from kvjax.formats.format import Format, LayerFormat
from kvjax.formats.kvquant import KVQuantKeys, KVQuantValues
from kvjax.formats.mixed import MIXED_BITS, LayerLosses, mixed_layers
from kvjax.formats.static_float8 import GREATEST, StaticFloat8
from kvjax.sealed import read_sealed, write_sealed

MAGIC = "kvjax format calibration"
VERSION = 2

BITS = (2, 3, 4)
"""Of codes that levels are measured for."""

CALIBRATED = ("fp8-calibrated", "mixed4", "mixed3", "kvquant4", "kvquant3", "kvquant2")
"""Formats that a calibration makes, by name; mixed4 takes no more bytes than int4."""

_AGAIN = "calibrate again"


@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """What one layer's keys, without their rotation, and values are like.

    Attributes:
      frequencies: [D / 2], of its rotary embedding, radians a token.
      sharpen: what that multiplies keys by.
      key_middle: [Hkv, D], of each channel's range, which leaves out few elements on either side.
      key_reach: [Hkv, D], from the middle to the range's ends.
      sink_middle: [Hkv, D], of the same of the first token of a sequence.
      sink_reach: [Hkv, D].
      key_levels: [2 ** bits] for each of `BITS`, in reaches from the middle.
      value_levels: the same of values, in half of a token's range from its middle.
      key_most: [Hkv], the greatest distance of a key's element from its middle.
      value_most: [Hkv], the greatest magnitude of a value's element.
      losses: what codes of `MIXED_BITS` bits cost, in nats; None of a layer with a window.
    """

    frequencies: Constant
    sharpen: float
    key_middle: Constant
    key_reach: Constant
    sink_middle: Constant
    sink_reach: Constant
    key_levels: tuple[Constant, ...]
    value_levels: tuple[Constant, ...]
    key_most: Constant
    value_most: Constant
    losses: LayerLosses | None


@dataclasses.dataclass(frozen=True)
class FormatCalibration:
    """Of all layers of a model.

    Attributes:
      model: fingerprint of the model that ran.
      tokens: of text that were measured.
      layers: each one's.
    """

    model: str
    tokens: int
    layers: tuple[LayerCalibration, ...]

    def format(self, name: str) -> Format:
        """One of the formats `CALIBRATED`.

        Args:
          name: which.

        Raises:
          KvjaxError: there is none.
        """
        if name not in CALIBRATED:
            raise KvjaxError(
                f"format is {name!r}: a calibration makes one of {', '.join(CALIBRATED)}"
            )
        sinks = 0
        if name == "fp8-calibrated":
            made = [_float8(layer) for layer in self.layers]
        elif name.startswith("mixed"):
            losses = [layer.losses for layer in self.layers]
            shapes = [
                (layer.key_middle.shape[0], layer.key_middle.shape[1]) for layer in self.layers
            ]
            made = list(mixed_layers(losses, shapes, int(name.removeprefix("mixed"))))
            sinks = 1
        else:
            made = [_kvquant(layer, int(name.removeprefix("kvquant"))) for layer in self.layers]
        return Format(
            made[0].keys,
            made[0].values,
            sinks=sinks,
            layers=tuple(enumerate(made)),
            model=self.model,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as JSON, whole or not at all; an older file is replaced.

        Args:
          path: of the file.

        Raises:
          OSError: it cannot be written.
        """
        layers = [
            {field.name: _plain(getattr(layer, field.name)) for field in dataclasses.fields(layer)}
            for layer in self.layers
        ]
        body = {"model": self.model, "tokens": self.tokens, "layers": layers}
        write_sealed(path, body, magic=MAGIC, version=VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, model: str | None = None) -> "FormatCalibration":
        """Reads a calibration that `save` wrote.

        Args:
          path: of the file.
          model: fingerprint of the model that is to run; None takes any model's.

        Raises:
          KvjaxError: there is no such file, it is none of these, of another version or damaged, or
            the calibration is another model's.
          OSError: it cannot be read.
        """
        what = "format calibration"
        body = read_sealed(path, what=what, magic=MAGIC, version=VERSION, again=_AGAIN)
        name = f"{what} {os.fspath(path)}"
        try:
            found = cls(
                str(body["model"]),
                check_integer("tokens", body["tokens"], 1),
                tuple(_layer(layer) for layer in body["layers"]),
            )
            if not found.layers:
                raise ValueError("no layers")
        except (KeyError, TypeError, ValueError) as error:
            raise KvjaxError(f"{name} lacks or mistakes a field ({error}): {_AGAIN}") from error
        if model is not None and found.model != model:
            raise KvjaxError(
                f"{name} is for model {found.model[:12]}, and this one is {model[:12]}: {_AGAIN}"
            )
        return found


def load_calibrated(path: str | os.PathLike[str], name: str, *, model: str | None = None) -> Format:
    """A format by the calibration in a file; arguments and errors as of `FormatCalibration`."""
    return FormatCalibration.load(path, model=model).format(name)


def _float8(layer: LayerCalibration) -> LayerFormat:
    keys = StaticFloat8(
        _scale(layer.key_most),
        layer.key_middle,
        layer.sink_middle,
        layer.frequencies,
        layer.sharpen,
    )
    return LayerFormat(keys, StaticFloat8(_scale(layer.value_most)))


def _scale(most: Constant) -> Constant:
    """Of codes that reach from 0 to what was measured; where that is nothing, any."""
    return Constant(np.where(most.values > 0, most.values / GREATEST, 1.0))


def _kvquant(layer: LayerCalibration, bits: int) -> LayerFormat:
    at = BITS.index(bits)
    keys = KVQuantKeys(
        bits,
        layer.key_middle,
        layer.key_reach,
        layer.sink_middle,
        layer.sink_reach,
        layer.key_levels[at],
        layer.frequencies,
        layer.sharpen,
    )
    return LayerFormat(keys, KVQuantValues(bits, layer.value_levels[at]))


def _plain(value: Any) -> Any:
    """What JSON can hold of a layer's field."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.values.tolist() if isinstance(value, Constant) else value


def _layer(fields: dict[str, Any]) -> LayerCalibration:
    """A layer from what JSON held.

    Raises:
      KeyError, TypeError, ValueError: a field lacks, or is of another shape or not finite.
    """
    arrays: dict[str, Any] = {
        name: _constant(name, fields[name])
        for name in (
            "frequencies",
            "key_middle",
            "key_reach",
            "sink_middle",
            "sink_reach",
            "key_most",
            "value_most",
        )
    }
    heads, dim = arrays["key_middle"].shape
    shapes = {
        "frequencies": (dim // 2,),
        "key_reach": (heads, dim),
        "sink_middle": (heads, dim),
        "sink_reach": (heads, dim),
        "key_most": (heads,),
        "value_most": (heads,),
    }
    levels: dict[str, Any] = {}
    for name in ("key_levels", "value_levels"):
        levels[name] = tuple(_constant(name, row) for row in fields[name])
        if [row.shape for row in levels[name]] != [(2**bits,) for bits in BITS]:
            raise ValueError(f"{name} are not of {BITS} bits")
        if any((np.diff(row.values) < 0).any() for row in levels[name]):
            raise ValueError(f"{name} do not ascend")
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
    sharpen = float(fields["sharpen"])
    if not sharpen > 0:
        raise ValueError(f"sharpen is {sharpen}")
    losses = None if fields["losses"] is None else LayerLosses(*map(_losses, fields["losses"]))
    return LayerCalibration(sharpen=sharpen, losses=losses, **arrays, **levels)


def _losses(values: Any) -> tuple[float, ...]:
    losses = tuple(map(float, values))
    if len(losses) != len(MIXED_BITS) or not all(0 <= loss < np.inf for loss in losses):
        raise ValueError(f"losses are {values}, not {len(MIXED_BITS)} finite numbers of 0 or more")
    return losses


def _constant(name: str, values: Any) -> Constant:
    array = Constant(values)
    if not np.isfinite(array.values).all():
        raise ValueError(f"{name} is not finite")
    return array
