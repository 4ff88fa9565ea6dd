"""A solved plan of resident windows: how many slots each layer's KV heads have, kept as a file."""

import dataclasses
import os

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from kvjax.errors import KvjaxError, check_integer, is_integer
from kvjax.sealed import read_sealed, write_sealed

MAGIC = "kvjax window plan"
VERSION = 1

_MOST_SLOTS = 2**31 - 1
_AGAIN = "profile this model and solve the plan again"


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """Slots of the resident window of every layer and KV head. Hashable, static under jit.

    Attributes:
      slots: [layers][KV heads], pages each head keeps on the device, 0 or more; of layers that see
        the whole context, since those with a sliding window choose no pages.
      model: fingerprint of the model that was profiled (`Identity.weights` of its pages).
      page_size: tokens a page.

    Raises:
      KvjaxError: rows of different lengths or none, or a value out of range.
    """

    slots: tuple[tuple[int, ...], ...]
    model: str
    page_size: int

    def __post_init__(self) -> None:
        layers = self.slots if isinstance(self.slots, tuple) else ()
        rows = {len(row) if isinstance(row, tuple) else 0 for row in layers}
        if len(rows) != 1 or 0 in rows:
            raise KvjaxError(
                f"slots is {self.slots!r}: must be a tuple of layers, each a tuple of as many KV "
                f"heads"
            )
        for layer, row in enumerate(self.slots):
            for head, count in enumerate(row):
                if not (isinstance(count, int) and is_integer(count, 0)) or count > _MOST_SLOTS:
                    raise KvjaxError(
                        f"slots[{layer}][{head}] is {count!r}: must be an integer from 0 to "
                        f"{_MOST_SLOTS}"
                    )
        if not isinstance(self.model, str) or not self.model:
            raise KvjaxError(f"model is {self.model!r}: must be the profiled model's fingerprint")
        object.__setattr__(self, "page_size", check_integer("page_size", self.page_size, 1))

    @classmethod
    def of(cls, slots: ArrayLike, model: str, page_size: int) -> "WindowPlan":
        """The plan of solved windows.

        Args:
          slots: integers [L, Hkv], as `greedy_windows` returns them.
          model: see `WindowPlan`.
          page_size: see `WindowPlan`.

        Raises:
          KvjaxError: see `WindowPlan`.
        """
        array = np.asarray(slots)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise KvjaxError(
                f"slots has shape {array.shape} and dtype {array.dtype}: must be integers "
                f"[layers, KV heads]"
            )
        return cls(tuple(tuple(row) for row in array.tolist()), model, page_size)

    @property
    def array(self) -> Int32[np.ndarray, "L Hkv"]:
        """`slots` as an array."""
        return np.array(self.slots, np.int32)

    @property
    def total(self) -> int:
        """Slots of all layers and heads."""
        return sum(map(sum, self.slots))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all; an older file of that name is replaced.

        Args:
          path: of the file.

        Raises:
          OSError: it cannot be written.
        """
        write_sealed(path, dataclasses.asdict(self), magic=MAGIC, version=VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, model: str, page_size: int) -> "WindowPlan":
        """Reads a plan that `save` wrote, for this model and page size.

        Args:
          path: of the file.
          model: fingerprint of the model that is to run.
          page_size: tokens a page it is to run with.

        Raises:
          KvjaxError: there is no such file, it is none of these, of another version or damaged, or
            the plan is another model's or another page size's.
          OSError: it cannot be read.
        """
        what, name = "window plan", f"window plan {os.fspath(path)}"
        body = read_sealed(path, what=what, magic=MAGIC, version=VERSION, again=_AGAIN)
        try:
            slots = tuple(tuple(row) for row in body["slots"])
            plan = cls(slots, body["model"], body["page_size"])
        except (KeyError, TypeError, KvjaxError) as error:
            raise KvjaxError(f"{name} lacks or mistakes a field ({error}): {_AGAIN}") from error
        plan.check(name, model=model, page_size=page_size)
        return plan

    def check(self, name: str, *, model: str, page_size: int) -> None:
        """Refuses a plan of another model or page size.

        Args:
          name: of the plan, which begins every refusal.
          model: fingerprint of the model that is to run.
          page_size: tokens a page it is to run with.

        Raises:
          KvjaxError: it is one.
        """
        if self.model != model:
            raise KvjaxError(
                f"{name} is for model {self.model[:12]}, and this one is {model[:12]}: {_AGAIN}"
            )
        if self.page_size != page_size:
            raise KvjaxError(
                f"{name} is for pages of {self.page_size} tokens, and these hold {page_size}: use "
                f"that page size, or {_AGAIN}"
            )
