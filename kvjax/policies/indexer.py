"""A model's lightning indexers, one a layer, and the file that keeps them."""

import base64
import dataclasses
import os
from typing import Any

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.formats.constant import Constant
from kvjax.policies.lightning_indexer import IndexerWeights, LayerIndexer
from kvjax.sealed import read_sealed, write_sealed

MAGIC, VERSION = "kvjax lightning indexer", 1
_AGAIN = "distil it again, with `kvjax distill indexer`"


@dataclasses.dataclass(frozen=True)
class DistilledIndexer:
    """What `kvjax.decode.distill_indexer` learned of a model. Hashable, static under jit.

    Attributes:
      model: SHA-256 of the weights that it was learned of, in hex; of a `form` none.
      layers: what each layer's pages are chosen by; None where the layer has a sliding window.
      losses: nats, each layer's in each step of training.
    """

    model: str
    layers: tuple[LayerIndexer | None, ...]
    losses: tuple[tuple[float, ...], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def learned(self) -> tuple[LayerIndexer, ...]:
        """Those of the layers that have one."""
        return tuple(layer for layer in self.layers if layer is not None)

    @property
    def form(self) -> "DistilledIndexer":
        """What programs are compiled for: one form for all that have arrays of the same shapes."""
        return DistilledIndexer("", tuple(x if x is None else x.form for x in self.layers))

    @property
    def weights(self) -> tuple[IndexerWeights | None, ...]:
        """Each layer's, as arrays; None where it has none."""
        return tuple(x if x is None else x.weights for x in self.layers)

    def check(self, *, model: str, name: str) -> None:
        """Refuse to choose for a model that this was not learned of.

        Args:
          model: SHA-256 of its weights.
          name: the model's.

        Raises:
          KvjaxError: it is another one.
        """
        if model != self.model:
            raise KvjaxError(
                f"by is an indexer of model {self.model[:12]}, and {name} is {model[:12]}: distil "
                f"one of this model, with `kvjax distill indexer`"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all.

        Args:
          path: the file, replaced if it is there.

        Raises:
          OSError: it cannot be written.
        """
        layers = [None if layer is None else _body(layer) for layer in self.layers]
        body = {"model": self.model, "layers": layers, "losses": self.losses}
        write_sealed(path, body, magic=MAGIC, version=VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DistilledIndexer":
        """Read a file that `save` wrote.

        Args:
          path: of the file.

        Raises:
          KvjaxError: there is none, or it is something else, of another version or damaged.
          OSError: it cannot be read.
        """
        body = read_sealed(path, what="indexer", magic=MAGIC, version=VERSION, again=_AGAIN)
        layers = tuple(None if fields is None else _layer(fields) for fields in body["layers"])
        return cls(body["model"], layers, tuple(map(tuple, body["losses"])))


def _body(layer: LayerIndexer) -> dict[str, Any]:
    arrays = {
        name: {
            "shape": list(each.shape),
            "float32": base64.b64encode(np.asarray(each, "<f4").tobytes()).decode(),
        }
        for name, each in layer.weights._asdict().items()
    }
    return {"arrays": arrays, "frequencies": layer.frequencies, "sharpen": layer.sharpen}


def _layer(fields: dict[str, Any]) -> LayerIndexer:
    learned = []
    for name in IndexerWeights._fields:
        array = fields["arrays"][name]
        values = np.frombuffer(base64.b64decode(array["float32"]), "<f4")
        learned.append(Constant(values.reshape(array["shape"])))
    return LayerIndexer(tuple(learned), tuple(fields["frequencies"]), fields["sharpen"])
