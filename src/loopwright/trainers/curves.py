"""Curves for other people's tools: TensorBoard, Weights & Biases, MLflow. The ledger has them in any case."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from loopwright.core.lazy import lazy_module

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


class _Writer(Protocol):
    def add(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Curves:
    """All the places where a run's curves go."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self._writers: list[_Writer] = [_WRITERS[name](directory) for name in names]

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Write one point of each curve."""
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        for writer in self._writers:
            writer.add(step, finite)

    def close(self) -> None:
        """Have all of it written."""
        for writer in self._writers:
            writer.close()


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        self._writer: Any = lazy_module("tensorboardX").SummaryWriter(str(directory / "tensorboard"))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path) -> None:
        self._run: Any = lazy_module("wandb").init(dir=str(directory), name=directory.name, resume="allow")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, directory: Path) -> None:
        self._mlflow: Any = lazy_module("mlflow")
        self._mlflow.start_run(run_name=directory.name)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_WRITERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}


def uninstalled(names: Sequence[str]) -> list[str]:
    """The packages that these places need and that are not installed."""
    return [PACKAGES[name] for name in names if find_spec(PACKAGES[name]) is None]
