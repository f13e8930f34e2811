"""Checkpoints are complete or absent, whenever the process is killed."""

import subprocess
import sys

import pytest

from loopwright.core.errors import StorageError
from loopwright.trainers.checkpoint import Checkpoints

KILLED = """
import os, signal, sys
from pathlib import Path
from loopwright.trainers.checkpoint import Checkpoints

PLACE = Path(sys.argv[1])

def save(step, left):
    # In a process that is killed after so many things that it does to the disk.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def count(event, _):
        nonlocal left
        if event.split(".")[0] in ("open", "os", "shutil"):
            if not left:
                signal.raise_signal(signal.SIGKILL)
            left -= 1

    def write(draft):
        for name in "ab":
            (draft / name).write_text(str(step))

    sys.addaudithook(count)
    Checkpoints(PLACE, 2).save(step, write)
    os._exit(0)

def latest():
    for each in PLACE.glob("step-*"):
        assert {file.name for file in each.iterdir()} == {"a", "b", "state.json"}, f"half of {each}"
        assert int((each / "b").read_text()) == int(each.name.removeprefix("step-"))
    return Checkpoints(PLACE, 2).latest()[0]

for step in (1, 2):
    assert save(step, 10**6) == 0
moment, step, found = 0, 3, set()
while save(step, moment) != 0:
    there = latest()
    found.add(step - there)
    step, moment = there + 1, moment + 1
assert found == {0, 1}, found
assert latest() == step
assert len([*PLACE.iterdir()]) == 2, "nothing is left lying about"
print(moment)
"""


def test_l09_a_kill_during_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


def test_l09_an_existing_checkpoint_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, lambda draft: (draft / "a").touch())

    def write(draft):
        raise AssertionError("written again")

    assert checkpoints.save(1, write) == tmp_path / "step-000001"
    assert checkpoints.latest()[0] == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoints: (checkpoints / "state.json").write_text("{"), "JSONDecodeError"),
        (
            lambda checkpoints: (checkpoints / "model.safetensors").write_bytes(b"wei"),
            "model.safetensors has 3 bytes, not 7",
        ),
        (lambda checkpoints: (checkpoints / "model.safetensors").unlink(), "FileNotFoundError"),
    ],
)
def test_a_damaged_checkpoint_is_reported_with_the_next_step(tmp_path, damage, message):
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        checkpoints.save(step, lambda draft: (draft / "model.safetensors").write_bytes(b"weights"))
    damage(tmp_path / "step-000002")
    with pytest.raises(StorageError, match=rf"step-000002 is damaged .*{message}.* Remove that directory"):
        checkpoints.latest()
