"""What healing has learnt so far, in a folder of Orbax checkpoints."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.errors import KvjaxError
from kvjax.storage.files import remove

_UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax names a checkpoint with that it did not finish


def check_healing_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that holds something, and no checkpoint.

    Args:
      folder: where a run's checkpoints are to be, or are.

    Raises:
      KvjaxError: it is not a run's.
    """
    path = pathlib.Path(folder)
    if not path.exists():
        return
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
    ours = [name.isdecimal() or _UNFINISHED in name for name in names]
    if names and (not path.is_dir() or not any(ours)):
        raise KvjaxError(
            f"{path} is already there and holds no checkpoint: healing keeps there what it has "
            f"learnt; move it away, or name another folder"
        )


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
        check_healing_folder(self.folder)
        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                return 0, [], fresh
            about = self._checked(manager, step)
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
            state = self._restored(manager, step, state=ocp.args.StandardRestore(target))["state"]
        return step, list(about["losses"]), state

    def _checked(self, manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
        """What is told of a state, which must be this run's."""
        about: dict[str, Any] = self._restored(manager, step, about=ocp.args.JsonRestore())["about"]
        for name, mine in self.identity.items():
            kept = about["identity"].get(name)
            if kept != mine:
                raise KvjaxError(
                    f"{self.folder} holds a run with {name}={kept!r}, and this one has "
                    f"{mine!r}: use the same settings to go on, or remove the folder"
                )
        return about

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
        """Remove the folder: the run is done, and its result is elsewhere.

        A folder without a checkpoint stays: this run made none.

        Raises:
          KvjaxError: what is there now is another run's, or damaged; it stays.
        """
        if self.folder is None or not self.folder.exists():
            return
        check_healing_folder(self.folder)
        with self._manager() as manager:
            step = manager.latest_step()
            if step is not None:
                self._checked(manager, step)
        if step is not None:
            remove(self.folder)
