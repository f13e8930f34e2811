"""Checkpoints: all that training goes on from, whole or not there at all, however the process ends."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import StorageError, storage

if TYPE_CHECKING:
    from torch import Tensor

_STATE, _TENSORS = "state.json", "trainer.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step, where it lies, and what was noted with it."""

    step: int
    directory: Path
    notes: Mapping[str, Any]

    def tensors(self) -> "dict[str, Tensor]":
        """What was learned by then, and what the optimizer remembered."""
        from safetensors.torch import load_file

        with storage(self.directory):
            return load_file(self.directory / _TENSORS)


class Checkpoints:
    """The checkpoints of a run, in a directory of their own; only the last few are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, tensors: "Mapping[str, Tensor]", notes: Mapping[str, Any]) -> Path:
        """Write a checkpoint. It has its name only once all of it is on disk."""
        from safetensors.torch import save_file

        final, draft = self._directory / f"step-{step:06d}", self._directory / f".step-{step:06d}"
        with storage(self._directory):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, draft / _TENSORS)
            (draft / _STATE).write_bytes(orjson.dumps({"step": step, **notes}))
            for path in (draft / _TENSORS, draft / _STATE, draft):
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)  # one that was replayed
            draft.rename(final)
            _sync(self._directory)
        for old in self._names()[: -self._keep]:
            shutil.rmtree(self._directory / old, ignore_errors=True)
        return final

    def latest(self) -> Checkpoint | None:
        """The last one that is whole."""
        for name in reversed(self._names()):
            directory = self._directory / name
            try:
                notes = orjson.loads((directory / _STATE).read_bytes())
                return Checkpoint(int(notes["step"]), directory, notes)
            except (OSError, ValueError, KeyError) as error:
                raise StorageError(
                    f"checkpoint {directory} is damaged ({type(error).__name__}: {error}). Remove that directory to go "
                    "on from the one before it."
                ) from error
        return None

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._directory.glob("step-*")) if self._directory.is_dir() else []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
