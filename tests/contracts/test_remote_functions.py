"""Contract A03: the arguments of remote agents, and agents that are functions."""

import asyncio
import re

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.rollouts.pools import steps
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.testing import LoopContract
from loopwright.testing.loops import RecordingEngine
from tests.rollouts.pools.ray_cluster import cluster  # noqa: F401
from tests.rollouts.remote.agents import (
    RemoteSetup,
    open_setup,
    run_agent,
    write_functions,
)


def test_a03_arguments_are_copied_for_each_trial(tmp_path):
    async def main():
        args = {"state": {"trials": []}, "more": [1]}
        name = write_functions(tmp_path)
        async with open_setup(tmp_path, function=f"{name}:solve", args=args) as setup:
            episodes = await asyncio.gather(*(setup.roll(trial=n) for n in range(4)))
        assert [episode.reason for episode in episodes] == [""] * 4
        assert episodes[0].evidence["agent"]["returned"] == {"reply": "an answer", "more": [1]}
        assert setup.config.args == {"state": {"trials": []}, "more": [1]}

    asyncio.run(main())


def test_a03_a_task_is_copied_for_each_trial_without_its_label(tmp_path):
    async def main():
        task = Task("t", ({"role": "user", "content": "this"},), "secret label", extra={"state": []})
        async with open_setup(tmp_path, function=f"{write_functions(tmp_path)}:rewrite") as setup:
            episodes = await asyncio.gather(*(setup.roll(task, trial=n) for n in range(2)))
        for episode in episodes:
            returned = episode.evidence["agent"]["returned"]
            assert returned == {"label": None, "state": ["t"], "content": "not this"}
            assert (episode.task.messages[0]["content"], episode.task.extra) == ("this", {"state": []})
            assert episode.task.label == "secret label", "the judger has it"

    asyncio.run(main())


def test_a03_a_command_gets_its_arguments_as_json(tmp_path):
    episode = run_agent(tmp_path, "print(json.loads(os.environ['LOOPWRIGHT_ARGS'])['depth'])", args={"depth": 3})
    assert episode.evidence["agent"]["stdout"] == "3\n"


def test_a03_a_function_that_raises_after_a_call_never_ends_or_blocks(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(steps, "_WARNING_S", 0.5)

    async def main():
        name = write_functions(tmp_path)
        async with open_setup(tmp_path, function=f"{name}:solve", args={"state": {}}) as setup:
            crashed = await setup.roll()
        async with open_setup(tmp_path, function=f"{name}:ignore_cancellation", deadline_s=0.5) as setup:
            late = await setup.roll()
            assert setup.sessions[0].status == "complete"
        async with open_setup(tmp_path, function=f"{name}:block", deadline_s=0.5) as setup:
            blocking = await setup.roll()
        return crashed, late, blocking

    crashed, late, blocking = asyncio.run(main())
    assert (crashed.outcome, crashed.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "AssertionError" in crashed.reason
    assert (late.outcome, late.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
    assert (blocking.outcome, blocking.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
    assert re.search(r":block blocked the event loop for [\d.]+ s\. Use an asynchronous client", blocking.reason)
    assert ":block blocks the event loop for 0.5 s so far" in caplog.text


def test_p02_a_deadline_is_extended_as_often_as_the_engine_needs(tmp_path):
    async def main():
        engine = ScriptedEngine(ScriptedConfig(replies=("an answer",), slip=0.0, delay_s=7.0), tmp_path)
        options = {"function": f"{write_functions(tmp_path)}:solve", "args": {"state": {"trials": []}}}
        async with open_setup(tmp_path, engine, deadline_s=2.0, **options) as setup:
            return await setup.roll()

    episode = asyncio.run(main())
    assert (episode.outcome, episode.fault, episode.answer) == (Outcome.OK, None, "an answer"), episode.reason


@pytest.mark.parametrize("parameter", ["workspace", "home", "instruction"])
def test_a03_a_function_has_its_own_directory_if_it_takes_one(tmp_path, parameter):
    async def main():
        body = f"async def look({parameter}):\n    return os.path.isdir({parameter})\n"
        (tmp_path / f"looks_for_{parameter}.py").write_text(f"import os\n\n\n{body}")
        async with open_setup(tmp_path, function=f"looks_for_{parameter}:look") as setup:
            return await setup.roll()

    episode = asyncio.run(main())
    assert episode.evidence["agent"]["returned"] is (parameter != "instruction")


def test_a03_the_parameters_of_a_function_are_checked_at_load_time(tmp_path):
    name = write_functions(tmp_path)

    def problems(function, **more):
        return "; ".join(map(str, RemoteConfig(function=f"{name}:{function}", **more).problems(tmp_path)))

    assert problems("solve", args={"state": {}}) == ""
    assert "has a parameter 'moon' that nothing provides" in problems("with_unknown_parameter")
    assert "has no parameter 'depth', which is in `args`" in problems("solve", args={"state": {}, "depth": 3})
    assert "not an async function" in problems("not_async")
    assert "outside any sandbox" in problems("ignore_cancellation", sandbox="bwrap")
    with pytest.raises(ValueError, match=r"unknown placeholder \{instructions\}.*Did you mean 'instruction'"):
        RemoteConfig(command=("agent", "{instructions}"))
    with pytest.raises(ValueError, match="one of `command`, `function` and `agent`"):
        RemoteConfig()


class TestRemoteFunction(LoopContract):
    """A remote loop passes the contract of all loops."""

    def make_config(self, directory, **settings):
        return RemoteConfig(function=f"{write_functions(directory)}:solve", args={"state": {"trials": []}}, **settings)

    def use(self, directory, body, *, engine=None, **settings):
        async def main():
            config = self.make_config(directory, **settings)
            policy = RecordingEngine(ScriptedConfig(replies=self.replies, **(engine or {})), directory)
            setup = RemoteSetup(directory, policy, **config.model_dump(exclude_unset=True))
            await setup.pool.start()
            setup.pool.handle = setup.pool.call
            setup.pool.apply_update = setup.pool.publish
            try:
                return await asyncio.wait_for(body(setup.pool, policy), 60)
            finally:
                await setup.pool.close()

        return asyncio.run(main())
