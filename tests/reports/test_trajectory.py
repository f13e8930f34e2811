"""trajectory.csv: appended while a run goes, and written again only if something in it has to change."""

import csv
import io
import os
import re
from pathlib import Path

import pytest

from loopwright.ledger.ledger import Ledger
from loopwright.reports import write_csv
from loopwright.reports.page import write_all
from loopwright.reports.search.trajectory import TrajectoryFile, write_trajectory
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from tests.contracts.harness import resumed

FUNCTION = """
from pathlib import Path
STOPS = Path(__file__).with_name("stops")
def score(x, mode="a", flag=True, tiny=0.5):
    if STOPS.exists(): raise ValueError("no license")
    if x > 0.9: raise ValueError('out of "range",\\nwith a second line')
    found = {"loss": x * 1e-6, "z": 3, "a": tiny / 1e9}
    return found if mode == "a" else {**found, "speed": 1 / 3}
"""
TWO = 'reward = [{ type = "negative", metrics = ["loss"] }, { type = "identity", metrics = ["z"] }]'
ONE = 'reward = { type = "negative", metrics = ["loss"] }'


def run(
    directory: Path,
    *,
    agent: str = 'type = "random", trials = 40',
    reward: str = ONE,
    parallel: int = 1,
    confirm: bool = False,
) -> Path:
    (directory / "scored.py").write_text(FUNCTION)
    (directory / "scenario.toml").write_text(f"""
name = "test"
[system]
parallel = {parallel}
[[run]]
name = "r"
agent = {{ {agent} }}
confirm = {str(confirm).lower()}
{reward}
[run.workload]
type = "python"
function = "scored:score"
[run.workload.args]
x = {{ low = 0.0, high = 1.0 }}
mode = ["a", "b, \\"c\\""]
flag = [true, false]
tiny = {{ low = 1e-9, high = 1.0, log = true }}
""")
    dispatch(load(directory / "scenario.toml"), directory / "out")
    return directory / "out/r/trajectory.csv"


def rewritten(directory: Path) -> str:
    """What the ledger gives, whatever the file has."""
    file = io.StringIO(newline="")
    with Ledger.read(directory / "out/r/ledger.db") as ledger:
        write_trajectory(ledger, file)
    return file.getvalue()


@pytest.mark.parametrize("reward", [ONE, TWO])
def test_what_a_run_has_appended_is_what_the_ledger_has_and_is_not_written_again(tmp_path, reward):
    path = run(tmp_path, reward=reward)
    before = path.stat()
    content = path.read_bytes()

    assert write_all(tmp_path / "out", check=True) == 0

    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert content.decode() == rewritten(tmp_path)
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    assert {row["outcome"] for row in rows} == {"ok", "crashed"}
    assert {row["metric.speed"] for row in rows} >= {"", "0.3333333333333333"}
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        write_csv(ledger, path.parent)
    assert path.stat().st_ino == before.st_ino


def test_a_file_that_somebody_changed_is_written_again(tmp_path):
    path = run(tmp_path)
    path.write_text(path.read_text().replace("crashed", "failed"))
    write_all(tmp_path / "out")
    assert path.read_bytes().decode() == rewritten(tmp_path)


def test_trials_that_end_out_of_order_are_put_in_order(tmp_path):
    path = run(tmp_path, parallel=4)
    assert path.read_bytes().decode() == rewritten(tmp_path)


def test_a_resumed_run_appends_to_a_complete_file(tmp_path):
    path = run(tmp_path)
    before = path.stat().st_ino
    campaign = tmp_path / "out/scenario.toml"
    campaign.write_text(campaign.read_text().replace("trials = 40", "trials = 50"))

    assert resumed(tmp_path) == 0

    assert path.stat().st_ino == before
    assert path.read_bytes().decode() == rewritten(tmp_path)
    assert len(list(csv.reader(io.StringIO(rewritten(tmp_path), newline="")))) == 51


def test_a_trial_that_was_read_again_is_written_again(tmp_path):
    path = run(tmp_path)
    with Ledger.open(tmp_path / "out/r/ledger.db") as ledger:
        trial = ledger.trial(1)
        assert trial is not None
        with ledger.transaction as connection:
            connection.execute("UPDATE trials SET result_seq = (SELECT max(seq) + 1 FROM events), reward = -7")
    write_all(tmp_path / "out")
    assert "-7.0" in path.read_text().splitlines()[1]


def test_trials_that_all_failed_stay_in_the_file_when_the_run_is_resumed(tmp_path):
    """Given failures alone, which have no metrics, when the run goes on, the file has them from the start."""
    (tmp_path / "stops").touch()
    path = run(tmp_path, agent='type = "random", trials = 4')
    assert path.read_text().count("crashed") == 4
    path.unlink()
    with Ledger.open(tmp_path / "out/r/ledger.db") as ledger:
        file = TrajectoryFile(ledger, path.parent)
        assert path.read_text().count("crashed") == 4
        file.close()


def test_a_report_of_a_run_that_has_confirmed_its_best_is_the_one_that_its_ledger_gives(tmp_path):
    """Given a confirmation, which has read all trials for the report as well, when it is made again, it is the same."""
    run(tmp_path, agent='type = "random", trials = 80', confirm=True, parallel=4)
    files = [tmp_path / "out/report.html", tmp_path / "out/r/best.toml", tmp_path / "out/r/trajectory.csv"]
    before = [re.sub(r"[\d-]+ [\d:]+ UTC", "", path.read_text()) for path in files]
    assert ",confirm," in before[2]
    for path in files:
        path.unlink()

    write_all(tmp_path / "out")

    assert [re.sub(r"[\d-]+ [\d:]+ UTC", "", path.read_text()) for path in files] == before
