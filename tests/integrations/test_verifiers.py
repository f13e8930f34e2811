"""Environments of the real `verifiers` package, in a separate interpreter: `make test-verifiers` sets it up."""

import asyncio
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import loopwright
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines import ScriptedConfig, ScriptedEngine
from loopwright.gateway import Gateway
from loopwright.rollouts.tasks import TasksError
from loopwright.rollouts.tasks.verifiers import VerifiersTasks, load
from tests.integrations.environments import episodes_of, write_scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import takes long on a busy machine
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed here: make test-verifiers"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "environments"
TASKS = {"type": "verifiers", "env": "sums_env", "args": {"count": 8}}
BROKEN = """
import verifiers as vf
from datasets import Dataset

def right(completion, answer):
    if answer == "28":
        raise ValueError("cannot judge 28")
    return float(answer in completion[-1]["content"].split())

class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        match state["answer"]:
            case "4":
                raise KeyError("a bug")
            case "8":
                raise vf.SandboxError("no sandbox left")
            case "16":
                return [{"role": "user", "content": "What is 1 + 1?"}]
        state["final_env_response"] = [{"role": "user", "content": "Thanks"}]
        return state["final_env_response"]

    async def render_completion(self, state):
        state["completion"] = state["trajectory"][-1]["completion"] if state["trajectory"] else []

def load_environment(**kwargs):
    rows = [{"question": f"What is {n} + {3 * n}?", "answer": str(4 * n)} for n in range(1, 9)]
    return Broken(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=5)

def load_grouped():
    pass
"""


@pytest.fixture(autouse=True)
def _environments(tmp_path):
    shutil.copy(EXAMPLE / "sums_env.py", tmp_path)
    (tmp_path / "broken_env.py").write_text(BROKEN)
    load.cache_clear()
    yield
    for name in ("sums_env", "broken_env", "foreign_policy"):
        sys.modules.pop(name, None)


class TestRollouts:
    def test_the_rubric_becomes_parts_and_metrics_and_every_token_is_captured(self, tmp_path):
        episodes = episodes_of(tmp_path, TASKS)
        assert len(episodes) == 8
        for index, episode in episodes.items():
            solved = (index + 1) % 3 != 0
            assert episode.reward.parts == {"correct": float(solved), "brief": 0.2}
            assert episode.reward.value == pytest.approx(solved + 0.2)
            metrics = episode.evidence["agent"]["returned"]["metrics"]
            assert (metrics["used_tool"], metrics["num_turns"]) == (float(solved), 1.0 + solved)
            assert episode.turns == 1 + solved
            assert episode.trainable
            assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled > 0

    def test_results_equal_those_of_verifiers_own_evaluation(self, tmp_path):
        ours = episodes_of(tmp_path, TASKS)
        theirs = asyncio.run(evaluate(8, tmp_path))
        for output in theirs:
            episode = ours[output["example_id"]]
            assert episode.reward.value == pytest.approx(output["reward"])
            score = episode.evidence["agent"]["returned"]
            assert {"correct": score["parts"]["correct"], "brief": 1.0, **score["metrics"]} == output["metrics"]

    def test_an_environment_that_raises_costs_one_sample_with_its_fault(self, tmp_path):
        episodes = episodes_of(tmp_path, {"type": "verifiers", "env": "broken_env"})
        faults = {index: (e.outcome, e.fault) for index, e in episodes.items() if e.outcome is not Outcome.OK}
        assert faults == {
            0: (Outcome.CRASHED, Fault.WORKLOAD),
            1: (Outcome.LOST, Fault.INFRA),
            6: (Outcome.JUDGE_FAILED, Fault.JUDGE),
        }
        assert "'a bug'" in episodes[0].reason
        assert "no sandbox left" in episodes[1].reason
        assert "reward function 'right' raised ValueError: cannot judge 28" in episodes[6].reason
        assert all((episodes[index].reward is None) == (index in faults) for index in range(8))

    def test_a_rollout_that_needs_too_many_turns_is_truncated_and_scored(self, tmp_path):
        loop = {**VerifiersTasks.brings["loop"], "max_turns": 2}
        episode = episodes_of(tmp_path, {"type": "verifiers", "env": "broken_env"}, loop=loop)[3]
        assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 2)
        assert episode.reward is not None


async def evaluate(count, directory):
    """What verifiers itself makes of the same environment and engine, through a gateway."""
    import verifiers as vf
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    engine = ScriptedEngine(ScriptedConfig(type="scripted", script="foreign_policy:policy", slip=0.0), directory)
    environment = vf.load_environment("sums_env", count=count)
    async with Gateway(engine) as gateway:
        session = await gateway.open("evaluation")
        async with AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key) as sdk:
            client = OpenAIChatCompletionsClient(sdk)
            results = await environment.generate(environment.get_dataset(), client, "policy")
    return results["outputs"]


class TestProblems:
    def test_verify_runs_nothing(self, tmp_path):
        assert loopwright.load(write_scenario(tmp_path, TASKS)).scenario.name == "foreign"
        assert len(VerifiersTasks(env="sums_env", args={"count": 4}, limit=3).load(tmp_path)) == 3

    @pytest.mark.parametrize(
        ("tasks", "words"),
        [
            ({"env": "no_such_env"}, "'no_such_env' cannot be imported: No module named 'no_such_env'"),
            ({"env": "unready_env"}, "'unready_env' cannot be imported: No module named 'no_such_package'"),
            ({"env": "sums_env", "args": {"size": 3}}, "unexpected keyword argument 'size'"),
            ({"env": "broken_env", "split": "eval"}, 'no dataset for split = "eval"; set split = "train"'),
        ],
    )
    def test_what_cannot_be_used_is_named(self, tmp_path, tasks, words):
        (tmp_path / "unready_env.py").write_text("import no_such_package\n")
        with pytest.raises(TasksError, match=words):
            VerifiersTasks(**tasks).load(tmp_path)

    def test_the_eval_split_is_its_own(self, tmp_path):
        assert len(VerifiersTasks(env="sums_env", split="eval").load(tmp_path)) == 5
