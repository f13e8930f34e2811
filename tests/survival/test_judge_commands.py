"""A judger's command does not outlive the process that started it, however that process ends."""

import os
import signal
import sys

from loopwright.ledger.ledger import Ledger
from loopwright.testing.executors import alive, written_pid
from tests.survival.campaign import Campaign, end_of, wait_for

SCENARIO = """
name = "survivor"
[[run]]
name = "work"
agent = { type = "collect", trials = 4, group_size = 2, seed = 1 }
[run.rollout]
tasks = { type = "jsonl", path = "tasks.jsonl" }
loop = { type = "single_turn" }
judger = { type = "command", command = ["PYTHON", "-IS", "judge.py"], files = ["judge.py"] }
[run.engine]
type = "scripted"
"""
# Hangs until the file `go` exists, with a child in another session.
JUDGE = """
import os, pathlib, subprocess, time
home = pathlib.Path(os.environ["LOOPWRIGHT_HOME"])
if not (home / "go").exists():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (home / f"{os.getpid()}.child").write_text(f"{child.pid}\\n")
    (home / f"{os.getpid()}.cwd").write_text(os.getcwd() + "\\n")
    time.sleep(1000)
"""


def test_s13_a_killed_driver_leaves_no_judge_running(tmp_path):
    campaign = Campaign(tmp_path, SCENARIO.replace("PYTHON", sys.executable))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "?", "label": "yes"}\n')
    (tmp_path / "judge.py").write_text(JUDGE)
    driver = campaign.start()
    wait_for(lambda: len(list(tmp_path.glob("*.cwd"))) == 4)  # the judger's concurrency
    judges = {int(path.stem): written_pid(path) for path in tmp_path.glob("*.child")}
    scratch = [path.read_text().strip() for path in tmp_path.glob("*.cwd")]
    assert all(map(alive, [*judges, *judges.values()]))

    driver.send_signal(signal.SIGKILL)
    end_of(driver)

    # Without resuming the run.
    wait_for(lambda: not any(map(alive, [*judges, *judges.values()])))
    wait_for(lambda: not any(map(os.path.exists, scratch)))
    (tmp_path / "go").touch()
    result = campaign.call("resume")
    assert result.code == 0, result.err
    with Ledger.read(campaign.ledger) as ledger:
        assert [trial.reward.value for trial in ledger.trials()] == [1.0] * 4
