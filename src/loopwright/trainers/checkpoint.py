"""Checkpoints: everything that training resumes from, written atomically."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson

from loopwright.core.errors import StorageError, storage

_STATE, _NAME = "state.json", "step-"


class Checkpoints:
    """The checkpoints of a run; only the last few are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint unless it exists. It gets its name after all of it is on disk."""
        final = self._path(step)
        partial = final.with_name(f".{final.name}")
        if final.is_dir():
            return final
        with storage(self._directory):
            for leftover in self._directory.glob(f".{_NAME}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            files = {path.name: path.stat().st_size for path in partial.iterdir() if path.is_file()}
            (partial / _STATE).write_bytes(orjson.dumps({"files": files}))
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(final)
            _sync(self._directory)
            for old in map(self._path, self.steps()[: -self._keep]):
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")), ignore_errors=True)
        return final

    def latest(self) -> tuple[int, Path] | None:
        """The step and the directory of the last checkpoint. Raises StorageError if it is damaged."""
        steps = self.steps()
        return (steps[-1], self.find(steps[-1])) if steps else None

    def find(self, step: int) -> Path:
        """The directory of this step's checkpoint. Raises StorageError if it is damaged."""
        directory = self._path(step)
        try:
            for name, size in orjson.loads((directory / _STATE).read_bytes())["files"].items():
                if (actual := (directory / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {actual} bytes, not {size}")
            return directory
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"checkpoint {directory} is damaged ({type(error).__name__}: {error}). Remove that directory to "
                "continue from the one before it."
            ) from error

    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        names = (path.name.removeprefix(_NAME) for path in self._directory.glob(f"{_NAME}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def _path(self, step: int) -> Path:
        return self._directory / f"{_NAME}{step:06d}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
