"""Checkpoints: whole or not there at all, wherever a process is killed."""

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
    return Checkpoints(PLACE, 2).latest().step

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


def test_l09_killed_at_any_moment_of_a_save_the_one_before_or_the_new_one_is_there(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10


def test_l09_one_that_is_there_is_not_written_again(tmp_path):
    made = Checkpoints(tmp_path, 2)
    made.save(1, lambda draft: (draft / "a").touch())

    def write(draft):
        raise AssertionError("written again")

    assert made.save(1, write) == tmp_path / "step-000001"
    assert made.latest().step == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda made: (made / "state.json").write_text("{"), "JSONDecodeError"),
        (lambda made: (made / "model.safetensors").write_bytes(b"wei"), "model.safetensors has 3 bytes, not 7"),
        (lambda made: (made / "model.safetensors").unlink(), "FileNotFoundError"),
    ],
)
def test_a_damaged_one_is_named_with_what_to_do(tmp_path, damage, said):
    made = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        made.save(step, lambda draft: (draft / "model.safetensors").write_bytes(b"weights"))
    damage(tmp_path / "step-000002")
    with pytest.raises(StorageError, match=rf"step-000002 is damaged .*{said}.* Remove that directory"):
        made.latest()
