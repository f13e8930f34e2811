"""Checkpoints: everything that training resumes from, written atomically."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson

from loopwright.core.errors import StorageError, storage

_STATE = "state.json"


class Checkpoints:
    """The checkpoints of a run; only the last few are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint unless it exists. It gets its name after all of it is on disk."""
        final, partial = self._directory / f"step-{step:06d}", self._directory / f".step-{step:06d}"
        if final.is_dir():
            return final
        with storage(self._directory):
            for leftover in self._directory.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            files = {path.name: path.stat().st_size for path in partial.iterdir() if path.is_file()}
            (partial / _STATE).write_bytes(orjson.dumps({"step": step, "files": files}))
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(final)
            _sync(self._directory)
            for old in self._names()[: -self._keep]:
                shutil.rmtree((self._directory / old).rename(self._directory / f".{old}"), ignore_errors=True)
        return final

    def latest(self) -> tuple[int, Path] | None:
        """The step and the directory of the last checkpoint. Raises StorageError if it is damaged."""
        names = self._names()
        if not names:
            return None
        directory = self._directory / names[-1]
        try:
            state = orjson.loads((directory / _STATE).read_bytes())
            for name, size in state.get("files", {}).items():
                if (actual := (directory / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {actual} bytes, not {size}")
            return int(state["step"]), directory
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"checkpoint {directory} is damaged ({type(error).__name__}: {error}). Remove that directory to "
                "continue from the one before it."
            ) from error

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._directory.glob("step-*")) if self._directory.is_dir() else []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
