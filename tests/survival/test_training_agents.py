"""Training on agents that misbehave: it finishes, learns only from sampled tokens, and reports what failed."""

import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file

from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.inprocess.models import tiny
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import steps
from tests.rollouts.harbor import write
from tests.rollouts.remote.agents import program, running
from tests.survival.campaign import Campaign, wait_for

pytestmark = pytest.mark.timeout(200)
SCENARIO = """
name = "survivor"
[[run]]
name = "work"
agent = {{ steps = 4, prompts_per_step = 2, lr = 1e-2, seed = 3, keep = 9, {agent} }}
[run.engine]
type = "transformers"
model = "tiny"
threads = 1
[run.gateway]
type = "embedded"
[run.rollout]
tasks = {tasks}
loop = {{ type = "remote", command = {command}, deadline_s = 20, concurrency = 4, sampling = {{ max_tokens = 6 }} }}
judger = {judger}
produce = {{ {produce} }}
"""
GRPO = 'type = "grpo", group_size = 3'
PPO = 'type = "ppo"'
LETTERS = """
def tasks():
    return [{"prompt": letter} for letter in "abcd"]

def judge(answer):
    return sum(map(ord, answer)) % 5 / 4
"""
TRIAL = "trial = int(os.environ['LOOPWRIGHT_TRIAL_NUMBER'])\n"


def campaign(directory: Path, agent_program: str, agent: str = GRPO, **parts: str) -> Campaign:
    """A training whose agents run this code, in which `trial` is the trial number."""
    directory.mkdir(exist_ok=True)
    (directory / "letters.py").write_text(LETTERS)
    row = {
        "tasks": '{ type = "python", function = "letters:tasks" }',
        "judger": '{ type = "python", function = "letters:judge" }',
        "produce": 'type = "sync"',
        **parts,
    }
    command = json.dumps(program(directory, TRIAL + agent_program))
    return Campaign(directory, SCENARIO.format(agent=agent, command=command, **row))


def training_record(training: Campaign):
    """The numbers of each training step, and all rollouts.

    Checks what must hold whatever agents do: each step counts exactly the tokens that the previous policy sampled in
    rollouts with a reward. One that is exactly as good as its group is not trained on.
    """
    connection = sqlite3.connect(training.ledger)
    groups = dict(connection.execute("SELECT grp, step FROM groups WHERE status = 'trained'"))
    connection.close()
    with Ledger.read(training.ledger) as ledger:
        numbers = {step.step: step.numbers for step in steps(ledger, "train")}
        all_rollouts = list(rollouts(ledger))
    tokens, rewards = Counter[int](), defaultdict[int | None, list[float]](list)
    for one in all_rollouts:
        if one.episode.reward is not None:
            rewards[one.episode.group].append(one.episode.reward.value)
    for rollout in all_rollouts:
        episode = rollout.episode
        assert episode.trainable <= (episode.reward is not None and episode.sampled > 0)
        assert (episode.reward is None) == (episode.fault not in (None, Fault.POLICY))
        if (step := groups.get(episode.group)) is not None and episode.trainable:
            tokens[step] += episode.sampled * (episode.reward.value != fmean(rewards[episode.group]))
            assert {span.version for node in episode.nodes for span in node.spans} == {step - 1}
    assert {step: row["tokens"] for step, row in numbers.items()} == {step: tokens[step] for step in numbers}
    return numbers, all_rollouts


def policy(training: Campaign):
    return load_file(training.output / "work" / "policy" / "model.safetensors")


@pytest.mark.parametrize("agent", [pytest.param(GRPO, marks=pytest.mark.slow), PPO], ids=["grpo", "ppo"])
def test_a01_agents_that_never_call_the_model_teach_it_nothing(tmp_path, agent):
    training = campaign(tmp_path, "print('42')", agent)
    result = training.call()
    assert result.code == 0, result.err
    numbers, all_rollouts = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
    assert result.err.count(" skipped: ") == 4
    assert {rollout.episode.reason for rollout in all_rollouts} == {"the agent never called the model"}
    assert len(all_rollouts) == (24 if agent == GRPO else 8), "none was repeated"
    before = tiny(attention="sdpa").state_dict()
    assert all(weight.equal(before[name]) for name, weight in policy(training).items())


@pytest.mark.slow
def test_a01_only_rollouts_with_calls_are_trained_on(tmp_path):
    training = campaign(tmp_path, "if trial % 2:\n    chat()")
    result = training.call()
    assert result.code == 0, result.err
    numbers, all_rollouts = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
    for rollout in all_rollouts:
        called = rollout.number % 2 == 1
        assert (rollout.episode.turns, rollout.episode.trainable) == (called, called)
        assert rollout.episode.in_baseline


DAEMON = """
if len(sys.argv) > 1:
    agent = f"/proc/{sys.argv[1]}"
    while os.path.exists(agent):
        time.sleep(0.01)
    for _ in range(20):
        try:
            chat("again")
            status = 200
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError:
            break  # training has ended, and the gateway with it
        with open(os.environ["LOOPWRIGHT_HOME"] + "/daemons", "a") as log:
            log.write(f"{trial} {status}\\n")
        time.sleep(0.1)
    sys.exit()
chat()
own, env = str(os.getpid()), {name: value for name, value in os.environ.items() if name != "LOOPWRIGHT_TRIAL"}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, __file__, own], env)
    os._exit(0)
os.wait()
"""


def test_t05_calls_of_an_agents_daemon_are_refused_and_not_trained_on(tmp_path):
    """It leaves its process session and environment, so that nobody finds it, and calls after its agent has ended."""
    training = campaign(tmp_path, DAEMON)
    result = training.call()
    assert result.code == 0, result.err
    wait_for(lambda: not running(str(tmp_path / "agent.py")))
    numbers, all_rollouts = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
    assert len(all_rollouts) == 24
    calls = [line.split() for line in (tmp_path / "daemons").read_text().splitlines()]
    refused = Counter[str]()
    for trial, status in calls:
        assert status != "200" or not refused[trial], "a closed session stays closed"
        refused[trial] += status != "200"
    assert len(refused) > 12, "the daemons called"
    assert sum(refused.values()) > 24
    assert {rollout.episode.outcome for rollout in all_rollouts} == {Outcome.OK}


KILLED = """
import http.client
from urllib.parse import urlsplit
if trial % 4 == 1:
    at = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(at.netloc)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    connection.request("POST", at.path + "/chat/completions", body, headers)
    time.sleep(trial % 3 * 0.004)
    os.kill(os.getpid(), 9)
chat()
"""


def test_a01_an_agent_killed_during_a_call_is_a_fault_and_training_continues(tmp_path):
    training = campaign(tmp_path, KILLED)
    result = training.call()
    assert result.code == 0, result.err
    numbers, all_rollouts = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
    killed_episodes = [rollout.episode for rollout in all_rollouts if rollout.number % 4 == 1]
    assert len(killed_episodes) >= 6
    for episode in killed_episodes:
        # The fault depends on whether it had got an answer before.
        fault = Fault.POLICY if episode.turns else Fault.WORKLOAD
        assert episode.fault is fault, episode.reason
        assert "SIGKILL" in episode.reason
    assert {r.episode.outcome for r in all_rollouts if r.number % 4 != 1} == {Outcome.OK}
    killed_count = sum(episode.fault is Fault.WORKLOAD for episode in killed_episodes)
    assert len(all_rollouts) == 24 + killed_count
    assert (max(row["fault_rate"] for row in numbers.values()) > 0) == (killed_count > 0)


CHANGER = """
said = chat()
with open("said", "w") as file:
    file.write(said)
if trial == 8:
    for name in {names}:
        with open(os.environ["LOOPWRIGHT_HOME"] + "/tasks/" + name + "/instruction.md", "a") as file:
            file.write("More.")
"""
SCORE = 'echo $(( $(wc -c < said) % 2 )) > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'


def harbor(directory: Path, changed: str) -> Campaign:
    """A training on three tasks, some of which the eighth agent changes."""
    for name in ("one", "two", "three"):
        write(directory / "tasks" / name, instruction=f"Do {name}.", test=SCORE)
    tasks, judger = '{ type = "harbor", path = "tasks" }', '{ type = "verifier" }'
    return campaign(directory, CHANGER.replace("{names}", changed), tasks=tasks, judger=judger)


def test_a02_a_task_that_changes_during_training_is_skipped_afterwards(tmp_path):
    training = harbor(tmp_path, '["two"]')
    result = training.call()
    assert result.code == 0, result.err
    numbers, all_rollouts = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
    broken = [rollout for rollout in all_rollouts if rollout.episode.fault is Fault.WORKLOAD]
    assert {rollout.episode.task.id.split("/")[-1] for rollout in broken} == {"two"}
    assert all("has changed" in rollout.episode.reason for rollout in broken)
    later = [rollout for rollout in all_rollouts if rollout.number > 12 and rollout not in broken]
    assert all(not rollout.episode.task.id.endswith("two") for rollout in later)
    assert sum(row["failed"] for row in numbers.values()) >= 1
    assert max(row["fault_rate"] for row in numbers.values()) > 0.5, "groups that failed completely count"


@pytest.mark.slow
def test_a02_training_fails_if_all_tasks_change_and_can_be_resumed(tmp_path):
    training = harbor(tmp_path, '["one", "two", "three"]')
    result = training.call()
    assert result.code == 1
    assert "gave nothing to train on" in result.err
    assert "has changed since its tasks were loaded" in result.err
    numbers, _ = training_record(training)
    assert 1 <= len(numbers) < 4
    for name in ("one", "two", "three"):
        (tmp_path / "tasks" / name / "instruction.md").write_text(f"Do {name}.")
    resume = training.call("resume")
    assert resume.code == 0, resume.err
    numbers, _ = training_record(training)
    assert list(numbers) == [1, 2, 3, 4]
