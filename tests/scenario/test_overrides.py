"""Overrides: `set=` and `--set` win over the environment and the file; a dict replaces a file."""

import tomllib

import pytest

from loopwright.core.errors import ScenarioError
from loopwright.scenario.dispatch import begin, reopen
from loopwright.scenario.load import load
from loopwright.scenario.overrides import parse_assignments


def test_dotted_keys_override_the_file(write):
    loaded = load(write(), set={"system.parallel": 4, "run.agent.trials": 9, "run.first.cache": "off", "name": "other"})
    (run,) = loaded.scenario.run
    assert (loaded.scenario.name, loaded.scenario.system.parallel) == ("other", 4)
    assert (run.agent.trials, run.cache) == (9, "off")


def test_a_key_applies_to_the_named_run_or_to_all(write):
    path = write()
    path.write_text(f"{path.read_text()}\n{path.read_text().partition('parallel = 2')[2].replace('first', 'v1.2')}")
    runs = load(path, set={"run.agent.seed": 7, "run.v1.2.agent.trials": 9}).scenario.run
    assert [(run.agent.seed, run.agent.trials) for run in runs] == [(7, 4), (7, 9)]


def test_a_missing_table_is_created(write):
    (run,) = load(write(), set={"run.rewards.metric_failure": -1.0}).scenario.run
    assert run.rewards.metric_failure == -1.0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("system.paralel", r"\[system\]: unknown key 'paralel'.* Did you mean 'parallel'\?"),
        ("run.agnet.trials", "no run and no key is called 'agnet'.* Did you mean 'agent'"),
        ("run.agent.trials.most", "agent.trials is not a table"),
        ("gateway.port", "no run has a remote loop"),
        ("colour", "unknown key 'colour'"),
    ],
)
def test_a_key_that_does_not_exist_is_a_problem(write, key, words):
    with pytest.raises(ScenarioError, match=words):
        load(write(), set={key: 1})


def test_assignments_are_json_or_text_depending_on_the_key():
    texts = ["system.parallel=4", "name=12", "run.agent.start=first", 'run.workload.args.x=["a", 1]', "gateway.host=1"]
    assert parse_assignments(texts) == {
        "system.parallel": 4,
        "name": "12",
        "run.agent.start": "first",
        "run.workload.args.x": ["a", 1],
        "gateway.host": "1",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [("x", "write KEY=VALUE"), ("=1", "write KEY=VALUE"), ("run.workload.args.x=[1", "not valid JSON")],
)
def test_a_broken_assignment_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        parse_assignments([text])


def test_a_dict_is_a_scenario_too(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = tomllib.loads(write().read_text())
    loaded = load(raw, set={"system.parallel": 3})
    assert loaded.scenario == load(write(), set={"system.parallel": 3}).scenario
    assert (loaded.path, loaded.directory) == (None, tmp_path)
    assert raw["system"]["parallel"] == 2, "the caller's dict is unchanged"
    (tmp_path / "elsewhere").mkdir()
    assert load(raw, directory="elsewhere").directory == tmp_path / "elsewhere"


def test_problems_of_a_dict_are_named(write):
    raw = tomllib.loads(write().read_text())
    with pytest.raises(ScenarioError, match=r"scenario: \[\[run\]\] name: is missing"):
        load({**raw, "run": [{key: value for key, value in raw["run"][0].items() if key != "name"}]})
    with pytest.raises(ScenarioError, match=r"scenario: \[system\] memory: cannot be None"):
        load({**raw, "system": {"memory": None}})


def test_a_resumed_campaign_keeps_its_overrides(write, tmp_path):
    (tmp_path / "out").mkdir()
    begin(load(tomllib.loads(write().read_text()), directory=tmp_path, set={"system.parallel": 3}), tmp_path / "out")
    again = reopen(tmp_path / "out", {"run.agent.trials": 6})
    assert (again.scenario.system.parallel, again.scenario.run[0].agent.trials) == (3, 6)
    assert again.directory == tmp_path


def test_another_system_leaves_out_the_keys_it_does_not_have(write):
    head = 'name = "x"\n[system]\ntype = "slurm"\npartition = "main"\nparallel = 3'
    assert load(write(head=head)).scenario.system.partition == "main"
    system = load(write(head=head), set={"system.type": "local", "system.pin_cpus": True}).scenario.system
    assert (system.type, system.parallel, system.pin_cpus) == ("local", 3, True)
    with pytest.raises(ScenarioError, match="qos"):
        load(write(head=head), set={"system.type": "local", "system.qos": "high"})
