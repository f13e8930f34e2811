"""Curves for other people's tools: real event files of TensorBoard, and the calls that W&B and MLflow would get."""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loopwright.trainers.curves import Curves


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard would draw: (tag, step) → value, from the event files as they are on disk."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in directory.glob("events.out.tfevents.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def test_event_files_hold_the_numbers(tmp_path):
    curves = Curves(["tensorboard"], tmp_path, "id")
    curves.add(1, {"train/reward": 0.25, "train/loss": float("nan")})
    curves.add(2, {"train/reward": 0.5, "eval/pass@1": 1})
    curves.close()
    found = scalars(tmp_path / "tensorboard")
    assert found == {("train/reward", 1): 0.25, ("train/reward", 2): 0.5, ("eval/pass_at_1", 2): 1.0}


@pytest.fixture
def wandb(monkeypatch):
    """The part of W&B that is used."""
    fake = SimpleNamespace(begun=[], logged=[], finished=0)

    def finish() -> None:
        fake.finished += 1

    def init(**told):
        fake.begun.append(told)
        return SimpleNamespace(log=lambda numbers, step: fake.logged.append((step, numbers)), finish=finish)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_goes_on_under_the_run_s_own_id(wandb, tmp_path):
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
    """The part of MLflow that is used; like it, it takes no `@` in a name."""
    fake = SimpleNamespace(begun=[], logged=[], ended=0)

    def start_run(run_id=None, run_name=None, tags=None):
        fake.begun.append((run_id, run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"given-{len(fake.begun)}"))

    def log_metrics(numbers, step):
        assert not any("@" in name for name in numbers)
        fake.logged.append((step, numbers))

    def end_run():
        fake.ended += 1

    fake.start_run, fake.log_metrics, fake.end_run = start_run, log_metrics, end_run
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def test_mlflow_goes_on_with_the_run_that_it_gave(mlflow, tmp_path):
    for step in (1, 2):
        curves = Curves(["mlflow"], tmp_path, "abc")
        curves.add(step, {"eval/pass@1": 0.5})
        curves.close()
    assert [run_id for run_id, _, _ in mlflow.begun] == [None, "given-1"]
    assert mlflow.begun[0][1:] == (tmp_path.name, {"loopwright": "abc"})
    assert mlflow.logged == [(1, {"eval/pass_at_1": 0.5}), (2, {"eval/pass_at_1": 0.5})]
    assert mlflow.ended == 2


def test_a_writer_that_cannot_even_begin_ends_nothing(wandb, tmp_path, caplog):
    wandb.init = None
    curves = Curves(["wandb", "tensorboard"], tmp_path, "id")
    curves.add(1, {"train/reward": 0.5})
    curves.close()
    assert "cannot write curves to wandb" in caplog.text
    assert scalars(tmp_path / "tensorboard")[("train/reward", 1)] == 0.5


def test_a_writer_that_fails_is_left_out_and_the_others_go_on(wandb, tmp_path, caplog):
    curves = Curves(["wandb", "tensorboard"], tmp_path, "id")
    wandb.logged = None  # so that the next line of it raises
    curves.add(1, {"train/reward": 0.5})
    curves.add(2, {"train/reward": 0.75})
    curves.close()
    assert "stopped writing curves to Wandb" in caplog.text
    assert scalars(tmp_path / "tensorboard")[("train/reward", 2)] == 0.75
    assert wandb.finished == 0
