"""Training whose agents run at a trial server: the server is killed in mid-step, and it shows nowhere but in time."""

import json
import re
from collections import Counter

import pytest

from loopwright.core.outcome import Outcome
from tests.contracts.test_trials import Server
from tests.survival.campaign import Campaign, end_of, wait_for
from tests.survival.test_training_agents import LETTERS, trained

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
token_file = "{server.home}/out/token"
command = {command}
deadline_s = 60
concurrency = 4
sampling = {{ max_tokens = 6 }}
"""
AGENT = """
trial = os.environ["LOOPWRIGHT_TRIAL_NUMBER"]
chat()
with open("{home}/begun", "a") as file:
    file.write(trial + " ")
while int(trial) > 8 and not os.path.exists("{home}/go"):
    time.sleep(0.01)
"""


def campaign(home, server):
    command = json.dumps(server.loop(AGENT.replace("{home}", str(server.home)))["command"])
    made = Campaign(home, SCENARIO.format(server=server, command=command))
    (home / "letters.py").write_text(LETTERS)
    return made


def begun(server):
    """How often each trial's agent has called the policy."""
    file = server.home / "begun"
    return Counter(map(int, file.read_text().split() if file.exists() else ()))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a04_a_training_whose_trial_server_is_killed_in_mid_step_trains_on_the_same_trials(tmp_path):
    """Given four agents in the second step that have talked to the policy and are at work when their server dies."""
    homes = {name: tmp_path / name for name in ("calm", "stormy", "calm-run", "stormy-run")}
    for home in homes.values():
        home.mkdir()
    (homes["calm"] / "go").touch()
    server = Server(homes["calm"], "-j", "4")
    calm = campaign(homes["calm-run"], server)
    assert calm.call().code == 0
    server.end()

    server = Server(homes["stormy"], "-j", "4")
    stormy = campaign(homes["stormy-run"], server)
    process = stormy.start()
    wait_for(lambda: sum(begun(server).values()) == 12 or process.poll() is not None)
    server.kill()
    server = Server(homes["stormy"], "-j", "4", "--port", re.search(r":(\d+)$", server.address)[1])
    (homes["stormy"] / "go").touch()
    ended = end_of(process)
    told = server.ask("GET", "/trials", key=server.token)
    server.end()

    assert ended.code == 0, ended.err
    numbers, found = trained(stormy)
    assert list(numbers) == [1, 2, 3]
    assert stormy.result() == calm.result(), "the same trials, with the same rewards"
    assert [trial.outcome for trial in stormy.trials()] == [Outcome.OK] * 18
    assert {rollout.episode.turns for rollout in found} == {1}, "what an agent said before the kill is not counted"
    assert told["counts"] == {"ended": 18}
    assert {trial["id"] for trial in told["trials"]} == {rollout.episode.evidence["server"]["id"] for rollout in found}
    twice = {number for number, times in begun(server).items() if times == 2}
    assert len(twice) == 4, "those that were at work"
    assert begun(server) == Counter(range(1, 19)) + Counter(twice)
    assert Counter(trial["attempts"] for trial in told["trials"]) == {1: 14, 2: 4}
