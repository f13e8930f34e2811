"""Tasks of the real `inspect_ai` package, in a separate interpreter: `make test-inspect` sets it up."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import loopwright
from loopwright.core.outcome import Fault, Outcome
from loopwright.rollouts.tasks import TasksError
from loopwright.rollouts.tasks.inspect import InspectTasks, load
from tests.integrations.environments import episodes_of, write_scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import takes long on a busy machine
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed here: make test-inspect"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "environments"
TASKS = {"type": "inspect", "task": "sums_task.py@sums", "args": {"count": 8}}
BROKEN = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, PARTIAL, Score, accuracy, scorer
from inspect_ai.solver import generate, solver
from inspect_ai.model import ChatMessageUser

VALUES = {3: CORRECT, 4: INCORRECT, 5: PARTIAL, 6: NOANSWER, 7: {"a": 0.25, "b": True}}

@solver
def odd():
    async def solve(state, generate):
        state = await generate(state)
        if state.sample_id == 1:
            raise KeyError("a bug")
        while state.sample_id == 8:
            state.messages.append(ChatMessageUser(content="What is 1 + 1?"))
            state = await generate(state)
        return state
    return solve

@scorer(metrics=[accuracy()])
def letters():
    async def score(state, target):
        if state.sample_id == 2:
            raise ValueError("cannot judge it")
        value = VALUES.get(state.sample_id, 1)
        return Score(value=value, answer=state.output.completion, explanation="so", metadata={"id": state.sample_id})
    return score

def make(**kwargs):
    samples = [Sample(input=f"What is {n} + {3 * n}?", target=str(4 * n), id=n) for n in range(1, 9)]
    return Task(**{"dataset": MemoryDataset(samples), "solver": odd(), "scorer": letters(), **kwargs})

@task
def broken():
    return make()

@task
def boxed():
    return make(sandbox="docker")

@task
def unscored():
    return make(scorer=None)
"""


@pytest.fixture(autouse=True)
def _tasks(tmp_path):
    shutil.copy(EXAMPLE / "sums_task.py", tmp_path)
    (tmp_path / "broken_task.py").write_text(BROKEN)
    load.cache_clear()
    yield
    sys.modules.pop("foreign_policy", None)


class TestRollouts:
    def test_scorers_become_parts_and_every_token_is_captured(self, tmp_path):
        episodes = episodes_of(tmp_path, TASKS)
        assert len(episodes) == 8
        for index, episode in episodes.items():
            solved = (index + 1) % 3 != 0
            assert episode.reward.parts == {"match": float(solved), "includes": float(solved)}
            assert episode.turns == 1 + solved
            assert episode.trainable
            assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled > 0

    def test_results_equal_those_of_inspects_own_evaluation(self, tmp_path):
        ours = episodes_of(tmp_path, TASKS)
        log = evaluate(tmp_path)
        assert log.status == "success"
        assert len(log.samples) == len(ours) == 8
        for sample in log.samples:
            theirs = {name: {"C": 1.0, "I": 0.0}[score.value] for name, score in sample.scores.items()}
            assert ours[sample.id - 1].reward.parts == theirs

    def test_each_kind_of_value_is_a_reward_and_failures_have_their_fault(self, tmp_path):
        loop = {**InspectTasks.brings["loop"], "max_turns": 3}
        episodes = episodes_of(tmp_path, {"type": "inspect", "task": "broken_task.py@broken"}, loop=loop)
        values = {index + 1: e.reward.value for index, e in episodes.items() if e.reward is not None}
        assert values == {3: 1.0, 4: 0.0, 5: 0.5, 6: 0.0, 7: 1.25, 8: 1.0}
        assert episodes[6].reward.parts == {"letters.a": 0.25, "letters.b": 1.0}
        metrics = episodes[3].evidence["agent"]["returned"]["metrics"]["letters"]
        assert (metrics["explanation"], metrics["metadata"]) == ("so", {"id": 4})
        crash, judge, cut = episodes[0], episodes[1], episodes[7]
        assert (crash.outcome, crash.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
        assert "KeyError: 'a bug'" in crash.reason
        assert (judge.outcome, judge.fault) == (Outcome.JUDGE_FAILED, Fault.JUDGE)
        assert "scorer 'letters' raised ValueError: cannot judge it" in judge.reason
        assert (cut.outcome, cut.fault, cut.turns) == (Outcome.TRUNCATED, Fault.POLICY, 3)

    def test_one_scorer_can_be_what_counts(self, tmp_path):
        episodes = episodes_of(tmp_path, TASKS, judger={"type": "environment", "reward": "match"})
        assert {episode.reward.value for episode in episodes.values()} == {0.0, 1.0}


def evaluate(directory):
    """What Inspect itself makes of the same task and engine, through a gateway in another thread."""
    import asyncio
    import threading

    from inspect_ai import eval
    from inspect_ai.model import get_model

    from loopwright.engines import ScriptedConfig, ScriptedEngine
    from loopwright.gateway import Gateway

    engine = ScriptedEngine(ScriptedConfig(type="scripted", script="foreign_policy:policy", slip=0.0), directory)
    ready, done, sessions = threading.Event(), threading.Event(), []

    async def serve():
        async with Gateway(engine) as gateway:
            sessions.append(await gateway.open("evaluation"))
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        (session,) = sessions
        name = "openai-api/loopwright/policy"
        model = get_model(name, base_url=session.openai_base_url, api_key=session.key, memoize=False)
        (log,) = eval(
            f"{directory}/sums_task.py@sums",
            model=model,
            task_args={"count": 8},
            log_dir=str(directory / "logs"),
            display="none",
        )
    finally:
        done.set()
        thread.join()
    return log


class TestProblems:
    def test_verify_runs_nothing(self, tmp_path):
        assert loopwright.load(write_scenario(tmp_path, TASKS)).scenario.name == "foreign"
        assert len(InspectTasks(task="sums_task.py@sums", limit=3).load(tmp_path)) == 3

    @pytest.mark.parametrize(
        ("task", "words"),
        [
            ("nowhere.py@sums", r"nowhere\.py not found"),
            ("broken_task.py", r"write it as broken_task\.py@task"),
            ("broken_task.py@boxed", "needs a sandbox of Inspect"),
            ("broken_task.py@unscored", "has no scorer"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, tmp_path, task, words):
        with pytest.raises(TasksError, match=words):
            InspectTasks(task=task).load(tmp_path)
