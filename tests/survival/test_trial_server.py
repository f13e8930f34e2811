"""Training whose agents run at a trial server that is killed during a step: it only takes longer."""

import json
import re
from collections import Counter

import pytest

from loopwright.core.outcome import Outcome
from tests.rollouts.trial_server.serving import TrialServerProcess
from tests.survival.campaign import Campaign, end_of, wait_for
from tests.survival.test_training_agents import LETTERS, training_record

SCENARIO = """
name = "survivor"
[[run]]
name = "work"
agent = {{ type = "grpo", steps = 3, prompts_per_step = 2, group_size = 3, lr = 1e-2, seed = 3 }}
[run.engine]
type = "transformers"
model = "tiny"
threads = 1
[run.rollout]
tasks = {{ type = "python", function = "letters:tasks" }}
judger = {{ type = "python", function = "letters:judge" }}
[run.rollout.loop]
type = "remote"
server = "{server.address}"
token_file = "{server.directory}/out/token"
command = {command}
deadline_s = 60
concurrency = 4
sampling = {{ max_tokens = 6 }}
"""
AGENT = """
trial = os.environ["LOOPWRIGHT_TRIAL_NUMBER"]
chat()
with open("{home}/starts", "a") as file:
    file.write(trial + " ")
while int(trial) > 8 and not os.path.exists("{home}/go"):
    time.sleep(0.01)
"""


def campaign(directory, server):
    command = json.dumps(server.loop(AGENT.replace("{home}", str(server.directory)))["command"])
    training = Campaign(directory, SCENARIO.format(server=server, command=command))
    (directory / "letters.py").write_text(LETTERS)
    return training


def count_starts(server):
    """How often the agent of each trial has called the policy."""
    file = server.directory / "starts"
    return Counter(map(int, file.read_text().split() if file.exists() else ()))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a04_a_training_whose_trial_server_is_killed_during_a_step_trains_on_the_same_trials(tmp_path):
    """Four agents of the second step have called the policy and are working when their server is killed."""
    directories = {
        name: tmp_path / name for name in ("undisturbed", "interrupted", "undisturbed-run", "interrupted-run")
    }
    for directory in directories.values():
        directory.mkdir()
    (directories["undisturbed"] / "go").touch()
    server = TrialServerProcess(directories["undisturbed"], "-j", "4")
    undisturbed = campaign(directories["undisturbed-run"], server)
    assert undisturbed.call().code == 0
    server.end()

    server = TrialServerProcess(directories["interrupted"], "-j", "4")
    interrupted = campaign(directories["interrupted-run"], server)
    process = interrupted.start()
    wait_for(lambda: sum(count_starts(server).values()) == 12 or process.poll() is not None)
    server.kill()
    server = TrialServerProcess(
        directories["interrupted"], "-j", "4", "--port", re.search(r":(\d+)$", server.address)[1]
    )
    (directories["interrupted"] / "go").touch()
    result = end_of(process)
    listing = server.ask("GET", "/trials", key=server.token)
    server.end()

    assert result.code == 0, result.err
    numbers, all_rollouts = training_record(interrupted)
    assert list(numbers) == [1, 2, 3]
    assert interrupted.result() == undisturbed.result(), "the same trials, with the same rewards"
    assert [trial.outcome for trial in interrupted.trials()] == [Outcome.OK] * 18
    assert {rollout.episode.turns for rollout in all_rollouts} == {1}, "turns before the kill are not counted"
    assert listing["counts"] == {"ended": 18}
    assert {trial["id"] for trial in listing["trials"]} == {
        rollout.episode.evidence["server"]["id"] for rollout in all_rollouts
    }
    repeated = {number for number, times in count_starts(server).items() if times == 2}
    assert len(repeated) == 4, "those that were working"
    assert count_starts(server) == Counter(range(1, 19)) + Counter(repeated)
    assert Counter(trial["attempts"] for trial in listing["trials"]) == {1: 14, 2: 4}
