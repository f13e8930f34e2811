"""`type = "module:Class"`: a class in a file beside the scenario, for each family of classes."""

import re
import sys
from pathlib import Path

import pytest
from tests.command_line import run_verb

from loopwright.core.episode import Episode
from loopwright.core.errors import ScenarioError
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.load import load

MODULE = '''
import asyncio
from typing import ClassVar, Literal

from loopwright import Outcome, Result, Reward, RewardFunction, Workload, WorkloadConfig
from loopwright.agents.search.grid_random import Grid, GridConfig
from loopwright.engines.scripted import ScriptedEngine
from loopwright.rollouts.judgers.base import Judger
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
from loopwright.rollouts.tasks.sources import TasksConfig


class MyGridConfig(GridConfig):
    type: Literal["my_grid"] = "my_grid"
    note: str = ""


class MyGrid(Grid):
    Config = MyGridConfig


class Square(Workload):
    async def run(self, job):
        return Result(Outcome.OK, {"y": job.arguments["x"] ** 2})


class Negated(RewardFunction):
    def needs(self):
        return {"y"}

    def score(self, metrics):
        return Reward(-metrics["y"])


class Sums(TasksConfig):
    count: int = 2

    def label(self):
        return "sums"

    def rows(self, directory):
        return [{"prompt": f"{n} + {n} =", "label": str(2 * n)} for n in range(self.count)]


class TwiceConfig(LoopConfig):
    type: Literal["twice"] = "twice"
    question: str = "Sure?"


class Twice(AgentLoop):
    Config: ClassVar[type[LoopConfig]] = TwiceConfig

    async def run(self, task, session):
        first = await session.turn(task.messages)
        await session.turn([*task.messages, first.message, {"role": "user", "content": self.config.question}])
        return session.episode(task)


class Exact(Judger):
    needs = ("answer", "label")

    async def judge(self, payload):
        return Reward(float(payload.answer == payload.label))


class Echo(ScriptedEngine):
    """An engine whose config is inherited."""


class Unfinished(Judger):
    """Lacks `judge`."""
'''
SEARCH = """
name = "study"
[[run]]
name = "search"
agent = { type = "MODULE:MyGrid", note = "mine" }
reward = { type = "MODULE:Negated" }
[run.workload]
type = "MODULE:Square"
args = { x = [1, 2, 3] }
"""
ROLLOUT = """
name = "study"
[[run]]
name = "rollouts"
agent = { type = "collect", trials = 4, group_size = 2 }
[run.rollout]
tasks = { type = "MODULE:Sums", count = 2 }
loop = { type = "MODULE:Twice", question = "Really?" }
judger = { type = "MODULE:Exact" }
[run.engine]
type = "MODULE:Echo"
replies = ["0"]
slip = 0
"""


@pytest.fixture
def module(tmp_path, request):
    """The name of a module beside the scenario, new for each test."""
    name = f"classes_{abs(hash(request.node.name)) % 10**9}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    before = list(sys.path)
    yield name
    sys.path[:] = before
    sys.modules.pop(name, None)


@pytest.fixture
def study(tmp_path, module):
    def study(text: str) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text.replace("MODULE", module))
        return path

    return study


def loopwright(*words: object, cwd: Path) -> str:
    done = run_verb(cwd, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_agent_a_workload_and_a_reward_are_named_by_path(study, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    loopwright("run", study(SEARCH), "-o", tmp_path / "out", cwd=tmp_path / "elsewhere")
    loopwright("resume", tmp_path / "out", cwd=tmp_path / "elsewhere")
    with Ledger.read(tmp_path / "out" / "search" / "ledger.db") as ledger:
        rewards = [(trial.action["x"], trial.reward.value) for trial in ledger.trials()]
        about = ledger.state("run")
    assert rewards == [(1, -1.0), (2, -4.0), (3, -9.0)]
    assert (about["agent"]["type"].partition(":")[2], about["agent"]["note"]) == ("MyGrid", "mine")


@pytest.mark.parametrize("workers", [pytest.param(0, id="local"), pytest.param(1, id="ray", marks=pytest.mark.slow)])
def test_tasks_a_loop_a_judger_and_an_engine_are_named_by_path(study, tmp_path, workers):
    text = ROLLOUT.replace('"Really?"', f'"Really?", workers = {workers}').replace(
        'MODULE:Exact"', f'MODULE:Exact", workers = {workers}'
    )
    loopwright("run", study(text), "-o", tmp_path / "out", cwd=tmp_path)
    with Ledger.read(tmp_path / "out" / "rollouts" / "ledger.db") as ledger:
        episodes = [Episode.from_bytes(ledger.payload(number, "rollout")) for number in range(1, 5)]
    assert {(episode.task.label, episode.reward.value) for episode in episodes} == {("0", 1.0), ("2", 0.0)}
    assert all(episode.turns == 2 for episode in episodes)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (":MyGrid", ":Gird", r"\[run.agent\] type: '.*:Gird' cannot be used: module .* has no attribute 'Gird'"),
        (":MyGrid", ":Square", r"\[run.agent\] type: .*:Square' is not a subclass of loopwright.Agent"),
        ("MODULE:MyGrid", "nowhere:MyGrid", r"No module named 'nowhere'. Put nowhere.py beside the scenario"),
        ("MODULE:Negated", ":Negated", r"\[\[run\]\] reward type: ':Negated' cannot be used: write it as module"),
        ("MODULE:Square", "MODULE:Negated", r"\[run.workload\] type: .* is not a subclass of loopwright.Workload"),
        ('note = "mine"', 'nota = "mine"', r"\[run.agent\]: unknown key 'nota'.* Did you mean 'note'"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_problem_of_the_scenario(study, old, new, words):
    with pytest.raises(ScenarioError, match=words):
        load(study(SEARCH.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            ":Sums",
            ":Sum",
            r"\[run.rollout\] tasks: task source '.*:Sum' cannot be used: module .* has no",
        ),
        (":Exact", ":Twice", r"\[run.rollout\] judger: .*:Twice' is not a subclass of loopwright.Judger"),
        (":Twice", ":Exact", r"\[run.rollout\] loop: .*:Exact' is not a subclass of loopwright.AgentLoop"),
        (":Exact", ":Unfinished", r"\[run.rollout\] judger: .*:Unfinished' does not implement judge"),
        ("MODULE:Echo", "gone:Echo", r"\[run.engine\] type: 'gone:Echo' cannot be used: No module named 'gone'"),
    ],
)
def test_a_class_for_rollouts_that_cannot_be_used_is_a_problem_of_the_scenario(study, old, new, words):
    with pytest.raises(ScenarioError, match=words):
        load(study(ROLLOUT.replace(old, new)))


def test_the_example_in_the_guide_works(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"```python\n# my_judge.py\n(.*?)```", guide, re.DOTALL)
    (scenario,) = re.findall(r"```toml\n# study.toml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "my_judge.py").write_text(code)
    (tmp_path / "arith.jsonl").write_text('{"prompt": "6 + 8?", "label": "14"}\n')
    path = tmp_path / "study.toml"
    path.write_text(scenario)
    loopwright("run", path, "-o", tmp_path / "out", cwd=tmp_path)
    assert load(path).scenario.run[0].rollout.judger.timeout_s == 5
