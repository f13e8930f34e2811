"""Curves for other tools: real TensorBoard event files, and the calls that W&B and MLflow would get."""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loopwright.reports.curves import Curves


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard would draw: (tag, step) → value, from the event files as they are on disk."""
    from tensorboardX.proto.event_pb2 import Event

    values = {}
    for file in directory.glob("events.out.tfevents.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return values


def test_event_files_hold_the_numbers(tmp_path):
    curves = Curves(["tensorboard"], tmp_path, "id")
    curves.add(1, {"train/reward": 0.25, "train/loss": float("nan")})
    curves.add(2, {"train/reward": 0.5, "eval/pass@1": 1})
    curves.close()
    values = scalars(tmp_path / "tensorboard" / "1")
    assert values == {("train/reward", 1): 0.25, ("train/reward", 2): 0.5, ("eval/pass_at_1", 2): 1.0}


@pytest.fixture
def wandb(monkeypatch):
    """The part of W&B that is used."""
    fake = SimpleNamespace(begun=[], logged=[], finished=0)

    def finish() -> None:
        fake.finished += 1

    def init(**settings):
        fake.begun.append(settings)
        return SimpleNamespace(log=lambda numbers, step: fake.logged.append((step, numbers)), finish=finish)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_resumes_the_run_by_its_id(wandb, tmp_path):
    for step in (1, 2):
        curves = Curves(["wandb"], tmp_path / "learn", "abc")
        curves.add(step, {"train/reward": 0.5, "train/kl": float("inf")})
        curves.close()
    same = {"dir": str(tmp_path / "learn"), "name": "learn", "id": "abc", "resume": "allow"}
    assert wandb.begun == [same, same]
    assert wandb.logged == [(1, {"train/reward": 0.5}), (2, {"train/reward": 0.5})]
    assert wandb.finished == 2


@pytest.fixture
def mlflow(monkeypatch):
    """The part of MLflow that is used; like MLflow, it rejects `@` in a name."""
    fake = SimpleNamespace(begun=[], logged=[], runs_ended=0)

    def start_run(run_id=None, run_name=None, tags=None):
        fake.begun.append((run_id, run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"given-{len(fake.begun)}"))

    def log_metrics(numbers, step):
        assert not any("@" in name for name in numbers)
        fake.logged.append((step, numbers))

    def end_run():
        fake.runs_ended += 1

    fake.start_run, fake.log_metrics, fake.end_run = start_run, log_metrics, end_run
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def test_mlflow_resumes_the_run_that_it_created(mlflow, tmp_path):
    for step in (1, 2):
        curves = Curves(["mlflow"], tmp_path, "abc")
        curves.add(step, {"eval/pass@1": 0.5})
        curves.close()
    assert [run_id for run_id, _, _ in mlflow.begun] == [None, "given-1"]
    assert mlflow.begun[0][1:] == (tmp_path.name, {"loopwright": "abc"})
    assert mlflow.logged == [(1, {"eval/pass_at_1": 0.5}), (2, {"eval/pass_at_1": 0.5})]
    assert mlflow.runs_ended == 2


def test_a_writer_that_cannot_start_does_not_end_the_run(wandb, tmp_path, caplog):
    wandb.init = None
    curves = Curves(["wandb", "tensorboard"], tmp_path, "id")
    curves.add(1, {"train/reward": 0.5})
    curves.close()
    assert "cannot write curves to wandb" in caplog.text
    assert scalars(tmp_path / "tensorboard" / "1")[("train/reward", 1)] == 0.5


def test_a_failing_writer_is_dropped_and_the_others_continue(wandb, tmp_path, caplog):
    curves = Curves(["wandb", "tensorboard"], tmp_path, "id")
    wandb.logged = None  # so that its next write raises
    curves.add(1, {"train/reward": 0.5})
    curves.add(2, {"train/reward": 0.75})
    curves.close()
    assert "stopped writing curves to Wandb" in caplog.text
    assert scalars(tmp_path / "tensorboard" / "1")[("train/reward", 2)] == 0.75
    assert wandb.finished == 0
