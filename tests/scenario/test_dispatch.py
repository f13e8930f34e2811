"""The output directory: locked by one process at a time, and sufficient to resume."""

import subprocess
import sys

import pytest

from loopwright.core.errors import LedgerError, OutputBusy, StorageError
from loopwright.scenario.dispatch import begin, hold, reopen

HOLDER = """
import sys
from pathlib import Path
from loopwright.scenario.dispatch import hold

with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the directory until the test ends it."""
    command = [sys.executable, "-c", HOLDER, tmp_path / "out"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_directory_that_another_process_holds_is_refused_with_its_id(tmp_path, holder):
    with pytest.raises(OutputBusy, match=f"in use by process {holder.pid}"), hold(tmp_path / "out"):
        pass


def test_the_lock_ends_with_the_process_however_it_ends(tmp_path, holder):
    holder.kill()
    holder.wait()
    with hold(tmp_path / "out"):
        pass


def test_the_lock_can_be_taken_again(tmp_path):
    for _ in range(2):
        with hold(tmp_path / "out"):
            pass


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write to"), hold(tmp_path / "file" / "out"):
        pass


def test_a_campaign_is_reopened_with_its_original_scenario(tmp_path, write, loaded):
    (tmp_path / "out").mkdir()
    begin(loaded(), tmp_path / "out")
    write(args="[run.workload.args]\nx = [7, 8]")
    again = reopen(tmp_path / "out")
    assert again.scenario.run[0].workload.args["x"].values == (1, 2)
    assert again.directory == tmp_path


def test_a_directory_with_a_campaign_is_not_started_again(tmp_path, loaded):
    (tmp_path / "out").mkdir()
    begin(loaded(), tmp_path / "out")
    with pytest.raises(StorageError, match=r"already contains a campaign\. Continue it with `loopwright resume"):
        begin(loaded(), tmp_path / "out")


def test_a_directory_without_a_campaign_is_not_reopened(tmp_path):
    with pytest.raises(LedgerError, match="contains no campaign"):
        reopen(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"home": 5}'])
def test_a_damaged_campaign_is_named(tmp_path, content):
    (tmp_path / "campaign.json").write_text(content)
    with pytest.raises(LedgerError, match=r"campaign\.json is damaged"):
        reopen(tmp_path)
