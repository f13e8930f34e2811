"""Curves for TensorBoard, Weights & Biases and MLflow. The ledger has them in any case."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


class _Writer(Protocol):
    def add(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Curves:
    """Writes a run's curves to all configured tools. One that fails is logged and dropped: it must not end a run."""

    def __init__(self, names: Sequence[str] = (), directory: Path = Path(), run_id: str = "") -> None:
        self._writers: list[_Writer] = []
        for name in names:
            try:
                self._writers.append(_WRITERS[name](directory, run_id))
            except Exception:
                log.exception("cannot write curves to %s; they are in the ledger and in the report", name)

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add one point to each curve."""
        finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        self._each(lambda writer: writer.add(step, finite))

    def close(self) -> None:
        """Flush and close all of them."""
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[_Writer], None]) -> None:
        for writer in tuple(self._writers):
            try:
                act(writer)
            except Exception:
                self._writers.remove(writer)
                name = type(writer).__name__.removeprefix("_")
                log.exception("stopped writing curves to %s; they are in the ledger and in the report", name)


class _TensorBoard:
    def __init__(self, directory: Path, run_id: str) -> None:
        # A folder per process: two that write the same steps into one folder give a zigzag.
        folder = directory / "tensorboard"
        place = folder / f"{1 + len(list(folder.glob('*')))}"
        self._writer: Any = import_module("tensorboardX").SummaryWriter(str(place))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(_plain(name), value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, run_id: str) -> None:
        # Under the run's id, so that a resumed run continues there.
        wandb: Any = import_module("wandb")
        self._run = wandb.init(dir=str(directory), name=directory.name, id=run_id, resume="allow")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, directory: Path, run_id: str) -> None:
        self._mlflow: Any = import_module("mlflow")
        # MLflow assigns the id; it is stored, so that a resumed run continues there.
        id_file = directory / "mlflow-run"
        mlflow_id = id_file.read_text("utf-8") if id_file.exists() else None
        run = self._mlflow.start_run(run_id=mlflow_id, run_name=directory.name, tags={"loopwright": run_id})
        id_file.write_text(run.info.run_id, "utf-8")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_plain(name): value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _plain(name: str) -> str:
    """A name that TensorBoard and MLflow accept."""
    return name.replace("@", "_at_")


_WRITERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}


def missing_packages(names: Sequence[str]) -> list[str]:
    """The packages that these tools need and that are not installed."""
    return [PACKAGES[name] for name in names if find_spec(PACKAGES[name]) is None]
