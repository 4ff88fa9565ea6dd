"""What healing has learnt so far, in a folder of Orbax checkpoints."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.errors import KvjaxError
from kvjax.storage.files import remove


@dataclasses.dataclass(frozen=True)
class HealingFiles:
    """A folder that keeps the newest state of a run; without a folder, nothing is kept.

    Attributes:
      folder: where; None is nowhere.
      identity: what must be equal for a run to go on.
    """

    folder: pathlib.Path | None
    identity: dict[str, Any]

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None, identity: dict[str, Any]) -> "HealingFiles":
        """The files of a run.

        Args:
          folder: where; None is nowhere.
          identity: plain values.
        """
        return cls(None if folder is None else pathlib.Path(folder).absolute(), identity)

    def newest(self, fresh: Any) -> tuple[int, list[float], Any]:
        """Steps done, their losses, and the state after them; none, and `fresh`, if none is kept.

        Args:
          fresh: a pytree of arrays, as a run begins with.

        Raises:
          KvjaxError: the folder is another run's, or damaged.
        """
        if self.folder is None or not self.folder.exists():
            return 0, [], fresh
        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                return 0, [], fresh
            about = self._restored(manager, step, about=ocp.args.JsonRestore())["about"]
            for name, mine in self.identity.items():
                kept = about["identity"].get(name)
                if kept != mine:
                    raise KvjaxError(
                        f"{self.folder} holds a run with {name}={kept!r}, and this one has "
                        f"{mine!r}: use the same settings to go on, or remove the folder"
                    )
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
            state = self._restored(manager, step, state=ocp.args.StandardRestore(target))["state"]
        return step, list(about["losses"]), state

    def _restored(self, manager: ocp.CheckpointManager, step: int, **how: Any) -> Any:
        try:
            return manager.restore(step, args=ocp.args.Composite(**how))
        except (ValueError, KeyError, OSError) as error:
            raise KvjaxError(
                f"{self.folder} holds no whole checkpoint ({error}): remove the folder"
            ) from error

    def keep(self, step: int, losses: list[float], state: Any) -> None:
        """Write a state in the place of the one before it.

        Args:
          step: steps done.
          losses: of each.
          state: a pytree of arrays.

        Raises:
          OSError: it cannot be written.
        """
        if self.folder is None:
            return
        about = {"identity": self.identity, "losses": losses}
        with self._manager() as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    about=ocp.args.JsonSave(about), state=ocp.args.StandardSave(state)
                ),
            )
            manager.wait_until_finished()

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def drop(self) -> None:
        """Remove the folder: the run is done, and its result is elsewhere."""
        if self.folder is not None:
            remove(self.folder)
