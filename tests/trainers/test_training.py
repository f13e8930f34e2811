"""Training as a run of a scenario: its output, and how it handles failures."""

import shutil
import sqlite3
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from loopwright.core.errors import ScenarioError
from loopwright.engines.fleet import FleetConfig
from loopwright.engines.http.vllm import VllmConfig
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import steps
from loopwright.scenario.load import load
from tests.command_line import run_verb

SCENARIO = """
name = "letters"
[[run]]
name = "work"
agent = {{ type = "grpo", steps = 3, prompts_per_step = 2, group_size = 3, lr = 1e-2, seed = 3{agent} }}
[run.engine]
type = "transformers"
model = "tiny"
threads = 1
[run.rollout]
tasks = {{ type = "python", function = "letters:tasks" }}
loop = {{ type = "single_turn", sampling = {{ max_tokens = 6{sampling} }} }}
judger = {{ type = "python", function = "letters:{judge}", {judger} }}
produce = {{ {produce} }}
{more}
"""
LETTERS = """
import os

def tasks():
    return [{"prompt": letter} for letter in "abcd"]

def held_out():
    return [{"prompt": letter} for letter in "yz"]

def lower(answer):
    return sum(letter.islower() for letter in answer) / 6

def huge(answer):
    return 1e38 * (sum(map(ord, answer)) % 5)

def equal(answer):
    return 1.0

def half_equal(answer, messages):
    return 1.0 if messages[0]["content"] in "ab" else lower(answer)

def outage(answer):
    with open("calls", "a") as calls:  # several threads judge at a time
        calls.write("x")
        calls.flush()
        count = calls.tell()
    if 8 < count <= 24:
        raise RuntimeError("the judge is away")
    return lower(answer)
"""
HELD_OUT = '{ type = "python", function = "letters:held_out" }'
EVAL = f"""
[run.eval]
every = 2
samples = 2
tasks = {HELD_OUT}
"""
LLAMACPP = '{ type = "llamacpp", url = "http://localhost:8000", tokenizer = "tiny" }'


def write_scenario(directory, *, agent="", sampling="", judge="lower", judger="", produce='type = "sync"', more=EVAL):
    (directory / "letters.py").write_text(LETTERS)
    path = directory / "letters.toml"
    text = SCENARIO.format(agent=agent, sampling=sampling, judge=judge, judger=judger, produce=produce, more=more)
    path.write_text(text.replace(",  }", " }"))
    return path


def run(directory, *words, verb="run"):
    return run_verb(directory, verb, *words, OMP_NUM_THREADS="1")


def policy_of(directory):
    return directory / "out" / "work" / "policy"


def ledger(directory):
    return Ledger.read(directory / "out" / "work" / "ledger.db")


def statuses(directory):
    connection = sqlite3.connect(directory / "out" / "work" / "ledger.db")
    counts = dict(connection.execute("SELECT status, count(*) FROM groups GROUP BY 1"))
    connection.close()
    return counts


def by_step(directory):
    """Which groups each step was trained on."""
    connection = sqlite3.connect(directory / "out" / "work" / "ledger.db")
    rows = connection.execute("SELECT step, grp FROM groups WHERE status = 'trained' ORDER BY 1, 2").fetchall()
    connection.close()
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    scenario = write_scenario(directory, agent=', log = ["tensorboard"]')
    result = run(directory, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    return directory


def test_a_training_leaves_a_policy_checkpoints_and_numbers(trained):
    work = trained / "out" / "work"
    assert {path.name for path in (work / "checkpoints").iterdir()} == {"step-000002", "step-000003"}
    policy = load_file(work / "policy" / "model.safetensors")
    last = load_file(work / "checkpoints" / "step-000003" / "model.safetensors")
    assert all(weight.equal(last[name]) for name, weight in policy.items())
    assert list((work / "tensorboard").iterdir())
    with ledger(trained) as record:
        numbers = [step.numbers for step in steps(record, "train")]
        names = {name for one in numbers for name in one}
        held_out = {step.step: step.numbers for step in steps(record, "eval")}
    curves = {"reward", "mismatch_kl", "entropy", "clip_fraction", "grad_norm", "length", "staleness", "fault_rate"}
    assert {*curves, "lr"} <= names
    assert "kl" not in names  # no reference model
    assert held_out.keys() == {0, 2, 3}
    assert held_out[0]["rollouts"] == 4
    assert held_out[3]["reward_low"] <= held_out[3]["reward"] <= held_out[3]["reward_high"]
    assert {"pass@1", "pass@2"} <= held_out[3].keys()


def test_every_version_samples_for_its_own_step(trained):
    """Synchronous production is on policy: step n learns from version n - 1, and version n is evaluated."""
    with ledger(trained) as record:
        versions = Counter(
            (node_version, rollout.episode.task.messages[0]["content"] in "yz")
            for rollout in rollouts(record)
            for node_version in {span.version for node in rollout.episode.nodes for span in node.spans}
        )
    assert versions == {(0, False): 6, (1, False): 6, (2, False): 6, (0, True): 4, (2, True): 4, (3, True): 4}


def test_held_out_tasks_are_never_trained_on(trained):
    with ledger(trained) as record:
        for rollout in rollouts(record):
            held_out = rollout.episode.task.messages[0]["content"] in "yz"
            assert rollout.episode.trainable == rollout.episode.in_baseline == (not held_out)
            assert rollout.episode.reward is not None
    assert statuses(trained) == {"trained": 6}


def test_a_finished_training_is_not_trained_further(trained):
    work = trained / "out" / "work"
    before, last = (work / "policy" / "model.safetensors").read_bytes(), work / "checkpoints" / "step-000003"
    written_at = (last / "state.json").stat().st_mtime_ns
    result = run(trained, "out", verb="resume")
    assert result.returncode == 0, result.stderr
    assert (work / "policy" / "model.safetensors").read_bytes() == before
    assert (last / "state.json").stat().st_mtime_ns == written_at, "the last checkpoint is not written again"
    assert statuses(trained) == {"trained": 6}


@pytest.mark.parametrize("lost", [1, 2])
def test_l09_steps_after_a_lost_checkpoint_are_repeated_from_the_ledger(trained, tmp_path, lost):
    """As the error about a damaged checkpoint advises: remove it and continue from an earlier one or the start."""
    shutil.copytree(trained / "out", tmp_path / "out")
    work = tmp_path / "out" / "work"
    for directory in sorted((work / "checkpoints").iterdir())[-lost:]:
        shutil.rmtree(directory)
    result = run(tmp_path, "out", verb="resume")
    assert result.returncode == 0, result.stderr
    with ledger(trained) as one, ledger(tmp_path) as other:
        assert [trial.number for trial in other.trials()] == [trial.number for trial in one.trials()]
        for kind in ("train", "eval"):
            assert [step.step for step in steps(other, kind)] == [step.step for step in steps(one, kind)]
    assert by_step(tmp_path) == by_step(trained)
    before = load_file(trained / "out" / "work" / "policy" / "model.safetensors")
    for name, weight in load_file(work / "policy" / "model.safetensors").items():
        torch.testing.assert_close(weight, before[name])


def test_a_policy_can_be_served_and_trained_further(trained, tmp_path):
    scenario = write_scenario(tmp_path, more="")
    text = scenario.read_text().replace('model = "tiny"', f'model = "{policy_of(trained)}"')
    scenario.write_text(text)
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr


def test_asynchronous_training_uses_rollouts_within_the_staleness_limit(tmp_path):
    scenario = write_scenario(
        tmp_path,
        agent=", colocated = true",
        sampling=", temperature = 0.7",
        produce='type = "async", max_staleness = 1',
        more="",
    )
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    connection = sqlite3.connect(tmp_path / "out" / "work" / "ledger.db")
    trained = connection.execute("SELECT step - 1 - version FROM groups WHERE status = 'trained'").fetchall()
    connection.close()
    assert len(trained) == 6
    assert {staleness for (staleness,) in trained} <= {0, 1}


def test_non_finite_losses_are_skipped_reported_and_end_the_training(tmp_path):
    scenario = write_scenario(tmp_path, judge="huge", agent=", std = false, bad_steps = 2", more="")
    result = run(tmp_path, scenario, "--output", "out")
    with ledger(tmp_path) as record:
        skipped = [step.numbers.get("skipped", 0.0) for step in steps(record, "train")]
    assert result.returncode == 1
    assert "2 steps in a row" in result.stderr
    assert "resume" in result.stderr
    assert skipped == [1.0, 1.0]
    assert statuses(tmp_path) == {"trained": 4}, "a failed training is not repeated"
    again = run(tmp_path, "out", verb="resume")
    assert again.returncode == 0, again.stderr
    with ledger(tmp_path) as record:
        assert [step.step for step in steps(record, "train")] == [1, 2, 3]
    assert statuses(tmp_path) == {"trained": 6}


def test_a_training_that_uses_up_its_trials_is_evaluated_and_says_so(tmp_path):
    scenario = write_scenario(tmp_path, agent=", trials = 8")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    assert "training stopped at step 1 of 3: trial budget exhausted" in result.stderr
    with ledger(tmp_path) as record:
        assert [step.step for step in steps(record, "train")] == [1]
        assert [step.step for step in steps(record, "eval")] == [0, 1]
        evaluated = sum(rollout.evaluated is not None for rollout in rollouts(record))
    assert evaluated == 8, "evaluations do not use up trials"
    assert run(tmp_path, "out", verb="resume").returncode == 0
    with ledger(tmp_path) as record:
        assert len(list(record.trials())) == 6 + 8, "a resumed run counts correctly"


def test_the_first_rollouts_use_the_trained_policy_not_the_engines_weights(trained, tmp_path):
    scenario = write_scenario(tmp_path, agent=f', model = "{policy_of(trained)}"', more="")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    with ledger(tmp_path) as record:
        assert next(iter(steps(record, "train"))).numbers["mismatch_kl"] < 1e-6


def test_dynamic_sampling_trains_on_groups_that_differ(tmp_path):
    scenario = write_scenario(tmp_path, judge="half_equal", agent=", dynamic_sampling = true", more="")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    counts = statuses(tmp_path)
    assert counts["trained"] == 6
    assert counts["filtered"] >= 3
    with ledger(tmp_path) as record:
        episodes = [rollout.episode for rollout in rollouts(record)]
        assert sum(step.numbers["filtered"] for step in steps(record, "train")) >= 1
    easy = [episode for episode in episodes if episode.task.messages[0]["content"] in "ab"]
    assert len(easy) >= 9
    assert {episode.outcome for episode in easy} == {"filtered"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_two_ray_train_workers(tmp_path):
    scenario = write_scenario(tmp_path, agent=", workers = 2, cpus = 0.5, checkpoint_every = 2")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    assert statuses(tmp_path)["trained"] == 6
    assert len(load_file(policy_of(tmp_path) / "model.safetensors")) > 10


def test_equal_rewards_change_nothing_and_break_nothing(tmp_path):
    scenario = write_scenario(tmp_path, judge="equal", more="")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    assert statuses(tmp_path) == {"trained": 6}
    assert "step 3 skipped: there is nothing to learn from its 2 groups" in result.stderr


def test_training_waits_for_a_judge_outage_to_end(tmp_path):
    """The judge fails in mid-training: its breaker opens, rollouts wait, and none is trained on as a zero."""
    scenario = write_scenario(tmp_path, judge="outage", judger="retries = 0, breaker = 3, cooldown_s = 0.2", more="")
    result = run(tmp_path, scenario, "--output", "out")
    assert result.returncode == 0, result.stderr
    assert statuses(tmp_path)["trained"] == 6
    assert len((tmp_path / "calls").read_text()) > 24, "the judge was down and recovered"
    assert result.stderr.count("waits until its judger is back") == 1
    with ledger(tmp_path) as record:
        for rollout in rollouts(record):
            episode = rollout.episode
            if episode.reward is not None:
                assert episode.reward.value == pytest.approx(sum(map(str.islower, episode.answer)) / 6)
            else:
                assert not episode.trainable


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": ", top_p = 0.9"}, "[run.rollout] loop.sampling.top_p: changes which tokens"),
        (
            {"sampling": ", temperature = 0"},
            "[run.rollout] loop.sampling.temperature: with 0 there is nothing to learn",
        ),
        ({"agent": ", lora = { r = 4 }, layers = 2"}, "`layers` is for training without `lora`"),
        ({"agent": ", gpus = 1"}, "`gpus` is for `workers` of Ray Train; set `device`"),
        ({"agent": ", cpus = 2"}, "`cpus` is for `workers` of Ray Train"),
        ({"agent": ", workers = 2, gpus = 2"}, "gpus"),
        ({"agent": ', workers = 2, device = "cuda"'}, "`device` is for training in this process"),
        ({"agent": ", shard = true"}, "`shard` divides the model among `workers` of Ray Train: set at least 2 of them"),
        ({"agent": ", shard = true, workers = 1"}, "`shard` divides the model among `workers`"),
        ({"agent": ', log = ["mlflow"]'}, "pip install mlflow"),
        ({"agent": ", group_sise = 4"}, "group_size"),
        ({"more": EVAL.replace("held_out", "nowhere")}, "[run.eval] tasks"),
        ({"more": EVAL.replace("held_out", "tasks")}, "[run.eval] tasks: tasks/0 and 3 more would be trained on"),
        ({"more": "[run.eval]\ntasks = []"}, "[run.eval] tasks: is empty"),
        ({"more": EVAL.replace("{", "[{").replace("}", f"}}, {HELD_OUT}]")}, "two sources are called 'held_out'"),
    ],
)
def test_untrainable_scenarios_are_refused_at_load_time(tmp_path, options, words):
    with pytest.raises(ScenarioError) as error:
        load(write_scenario(tmp_path, **options))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("engine", "agent", "words"),
    [
        ('{ type = "scripted" }', ', model = "tiny"', "[run.engine] type: 'scripted' takes no weights"),
        (LLAMACPP, "", "[run.engine] type: 'llamacpp' takes no weights, so nothing can be trained"),
        (f'{{ type = "fleet", engines = [{LLAMACPP}] }}', "", "[run.engine] type: 'fleet' takes no weights"),
    ],
)
def test_an_engine_that_cannot_load_weights_is_refused(tmp_path, engine, agent, words):
    refused = replaced(write_scenario(tmp_path, agent=agent), f"engine = {engine}\n")
    assert words in refused


def test_an_external_gateway_needs_a_named_model(tmp_path):
    gateway = '[run.gateway]\ntype = "external"\nurl = "http://127.0.0.1:9"\n'
    refused = replaced(write_scenario(tmp_path, more=gateway), "", 'loop = { type = "remote", command = ["true"] }')
    assert "[run.agent] model: is missing: engine 'external' does not say which model it has" in refused


def test_the_model_trained_behind_a_server_matches_its_tokenizer():
    vllm = VllmConfig(url="http://localhost:8000", tokenizer="models/qwen", model="the-served-name")
    assert vllm.policy == "models/qwen"
    assert FleetConfig(engines=(vllm,)).policy == "models/qwen"


def test_the_gateway_of_a_trial_server_cannot_load_weights_and_is_refused(tmp_path):
    scenario = write_scenario(tmp_path, more='[run.gateway]\ntype = "server"')
    refused = replaced(scenario, "", 'loop = { type = "remote", server = "http://127.0.0.1:9", command = ["true"] }')
    assert '[run.gateway] type: "server" takes no weights' in refused


def replaced(scenario, engine, loop=None):
    """The problems of a scenario with another engine and another loop."""
    text = scenario.read_text()
    text = text.replace(text[text.index("[run.engine]") : text.index("[run.rollout]")], engine)
    scenario.write_text("\n".join(loop if loop and line.startswith("loop =") else line for line in text.splitlines()))
    with pytest.raises(ScenarioError) as error:
        load(scenario)
    return str(error.value)
