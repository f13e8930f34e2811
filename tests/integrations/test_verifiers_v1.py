"""Tasksets of the real `verifiers.v1`, in a separate interpreter: `make test-verifiers` sets it up."""

import asyncio
import sys
from importlib.util import find_spec

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.engines import ScriptedConfig, ScriptedEngine
from loopwright.gateway import Gateway
from loopwright.rollouts.tasks import TasksError
from loopwright.rollouts.tasks.verifiers import VerifiersTasks
from tests.integrations.environments import episodes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import takes long on a busy machine
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed here: make test-verifiers"),
]
TASKSET = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

class Sum(vf.Task[Data, vf.State]):
    @vf.reward(weight=2.0)
    async def correct(self, trace):
        if BROKEN and self.data.answer == "28":
            raise ValueError("cannot judge 28")
        return float(self.data.answer in trace.last_reply.split())

    @vf.reward(weight=0.0)
    async def short(self, trace):
        return float(len(trace.last_reply) < 80)

    @vf.metric
    async def replies(self, trace):
        return trace.num_turns

    async def setup(self, trace, runtime):
        if BROKEN and self.data.answer == "4":
            raise KeyError("a bug")

    async def finalize(self, trace, runtime):
        await runtime.write("finished", b"1")

    @vf.reward
    async def finished(self, trace, runtime):
        return 0.5 * float(await runtime.read("finished") == b"1")

class Config(vf.TasksetConfig):
    count: int = 8
    opens: bool = True
    image: str | None = None

class Sums(vf.Taskset[Sum, Config]):
    INFINITE = INFINITE_SETTING

    def load(self):
        for n in range(1, self.config.count + 1):
            prompt = f"What is {n} + {3 * n}?" if self.config.opens else None
            data = Data(idx=n, prompt=prompt, system_prompt="Add.", answer=str(4 * n), image=self.config.image)
            yield Sum(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())] if TOOLS else []

__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''
SEVERAL = """
class Two(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()

class Debate(vf.Env[Two]):
    async def run(self, task, agents):
        await agents.solver.run(task)

__all__ = ["Sums", "Debate"]
"""


@pytest.fixture
def write(tmp_path):
    """Writes a taskset under a name of its own."""
    names = []

    def write_taskset(name, *, tools=False, broken=False, infinite=False, extra=""):
        names.append(name)
        settings = f"TOOLS, BROKEN, INFINITE_SETTING = {tools}, {broken}, {infinite}\n"
        (tmp_path / f"{name}.py").write_text(settings + TASKSET + extra)
        return {"type": "verifiers", "env": name}

    yield write_taskset
    for name in [*names, "foreign_policy"]:
        sys.modules.pop(name, None)


class TestRollouts:
    def test_rewards_become_parts_and_metrics_and_every_token_is_captured(self, tmp_path, write):
        episodes = episodes_of(tmp_path, write("plain_sums"))
        assert len(episodes) == 8
        for index, episode in episodes.items():
            solved = (index + 1) % 3 != 0
            assert episode.reward.parts == {"correct": 2.0 * solved, "finished": 0.5}
            assert episode.reward.value == 2.0 * solved + 0.5
            assert episode.evidence["agent"]["returned"]["metrics"] == {"short": 1.0, "replies": 1.0}
            assert [message["role"] for message in episode.task.messages] == ["system", "user"]
            assert episode.task.label == str(4 * (index + 1))
            assert episode.trainable
            assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled > 0

    def test_tools_of_a_taskset_are_called(self, tmp_path, write):
        episodes = episodes_of(tmp_path, write("sums_with_tools", tools=True))
        for index, episode in episodes.items():
            solved = (index + 1) % 3 != 0
            assert episode.turns == 1 + solved
            assert episode.reward.parts["correct"] == 2.0 * solved

    def test_results_equal_those_of_verifiers_own_agent(self, tmp_path, write):
        ours = episodes_of(tmp_path, write("own_sums"))
        for index, trace in enumerate(asyncio.run(evaluate(tmp_path))):
            assert trace.ok, trace.last_error
            score = ours[index].evidence["agent"]["returned"]
            assert score["reward"] == trace.reward
            assert {**score["metrics"], "short": None} == {**trace.metrics, "short": None}

    def test_failures_have_their_fault_and_no_reward(self, tmp_path, write):
        episodes = episodes_of(tmp_path, write("broken_sums", broken=True))
        faults = {index: (e.outcome, e.fault) for index, e in episodes.items() if e.outcome is not Outcome.OK}
        assert faults == {0: (Outcome.CRASHED, Fault.WORKLOAD), 6: (Outcome.JUDGE_FAILED, Fault.JUDGE)}
        assert "KeyError: 'a bug'" in episodes[0].reason
        assert "cannot judge 28" in episodes[6].reason
        assert all((episodes[index].reward is None) == (index in faults) for index in range(8))

    @pytest.mark.parametrize("ours", [True, False])
    def test_a_rollout_that_needs_too_many_turns_is_truncated_and_scored(self, tmp_path, write, ours):
        tasks = write(f"limited_sums_{ours:d}", tools=True)
        rollout = {"loop": {**VerifiersTasks.brings["loop"], "max_turns": 1}} if ours else {}
        tasks |= {} if ours else {"agent": {"max_turns": 1}}
        episode = episodes_of(tmp_path, tasks, **rollout)[0]
        assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
        assert episode.reward.parts == {"correct": 0.0, "finished": 0.5}


async def evaluate(directory):
    """What verifiers' own agent makes of the same taskset and engine, through a gateway."""
    import verifiers.v1 as vf

    from loopwright.rollouts.tasks.verifiers_v1 import ChatHarness

    engine = ScriptedEngine(ScriptedConfig(type="scripted", script="foreign_policy:policy", slip=0.0), directory)
    taskset = vf.load_taskset(vf.taskset_config_type("own_sums")(id="own_sums"))
    async with Gateway(engine) as gateway:
        session = await gateway.open("evaluation")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVALUATION_API_KEY", session.key)
            client = vf.EvalClientConfig(base_url=session.openai_base_url, api_key_var="EVALUATION_API_KEY")
            harness, runtime = vf.harness_config_type("null")(id="null"), vf.SubprocessConfig()
            agent = vf.Agent(vf.AgentConfig(harness=harness, runtime=runtime, model="policy", client=client))
            agent.harness = ChatHarness(harness)  # verifiers' own would be installed from an index
            return [await agent.run(task) for task in taskset]


class TestProblems:
    @pytest.mark.parametrize(
        ("settings", "tasks", "words"),
        [
            ({}, {"args": {"size": 3}}, "size: Extra inputs are not permitted"),
            ({}, {"agent": {"turns": 3}}, "turns: Extra inputs are not permitted"),
            ({}, {"split": "eval"}, "has no split"),
            ({}, {"args": {"opens": False}}, "task 0 of .* has no prompt"),
            ({}, {"args": {"image": "swebench/one"}}, "requires image 'swebench/one'.*docker"),
            ({}, {"agent": {"harness": {"id": "bash"}}}, "executes what the policy writes: say where"),
            ({"infinite": True}, {}, "has no end: set `limit`"),
            ({"extra": SEVERAL}, {}, "has its own `Env`, with several agents"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, tmp_path, write, request, settings, tasks, words):
        name = f"refused_{abs(hash(request.node.name))}"
        with pytest.raises(TasksError, match=words):
            VerifiersTasks(**{**write(name, **settings), **tasks}).load(tmp_path)

    def test_an_endless_taskset_is_read_as_far_as_the_limit(self, tmp_path, write):
        source = VerifiersTasks(**write("endless_sums", infinite=True), args={"count": 10**9}, limit=3)
        assert len(source.load(tmp_path)) == 3

    def test_agent_settings_of_an_older_environment_are_refused(self, tmp_path):
        (tmp_path / "old_env.py").write_text("def load_environment():\n    pass\n")
        with pytest.raises(TasksError, match="`agent` is for tasksets"):
            VerifiersTasks(env="old_env", agent={"max_turns": 2}).load(tmp_path)
