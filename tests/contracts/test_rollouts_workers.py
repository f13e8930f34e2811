"""Contracts L15 and L16: a rollout that crashes, blocks or hangs costs itself, and nothing keeps a run from ending."""

import asyncio
import ctypes
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.rollouts.pools import actor_host
from loopwright.rollouts.pools.base import EventLoopBlocked, WorkerLost
from loopwright.testing.pools import Probe
from tests.rollouts.harness import World
from tests.rollouts.pools.ray_cluster import cluster, pool_of

__all__ = ["cluster"]
TASK = Task("t", ({"role": "user", "content": "1"},), label="1", extra={"points": [1]})


class Fatal(Probe):
    async def end_process(self, how):
        await asyncio.sleep(0.05)
        await asyncio.gather(self._end(how))  # in a task of its own, as a tool may be

    async def _end(self, how):
        await asyncio.sleep(0)
        if how == "in a thread":  # whose, nobody knows
            await asyncio.to_thread(os._exit, 1)
        ctypes.string_at(0) if how == "segfault" else os._exit(1)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "how", ["segfault", *(pytest.param(how, marks=pytest.mark.slow) for how in ("exit", "in a thread"))]
)
def test_l15_a_crash_costs_the_call_that_caused_it_and_its_neighbours_are_issued_again(how):
    async def main():
        pool = pool_of(1, Fatal)  # all share one worker, which dies twice, or until the fatal call is alone
        await pool.start()
        try:
            fatal = asyncio.ensure_future(pool.call(("end_process", how)))
            others = [asyncio.ensure_future(pool.call(("sleep", 0.3))) for _ in range(8)]
            assert await asyncio.gather(*others) == [0.3] * 8
            with pytest.raises(WorkerLost, match="two workers died during this call"):
                await fatal
        finally:
            await pool.close()

    asyncio.run(main())


class Blocking(AgentLoop):
    async def run(self, task, session):
        if task.id == "blocks":
            time.sleep(0.9)
        elif task.id == "sleeps":
            time.sleep(3600)
        elif task.id == "never yields":
            while True:
                with suppress(Exception):
                    self.spins = True
        elif task.id == "sleeps in a task":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.sleep())
        else:
            await asyncio.sleep(0.05)
        return session.episode(task)

    async def sleep(self):
        time.sleep(3600)


class Leaving(AgentLoop):
    async def run(self, task, session):
        if task.id == "leaves":
            await asyncio.create_task(self.leave())
        return session.episode(task)

    async def leave(self):
        await asyncio.sleep(0)
        sys.exit(3)


class Changing(AgentLoop):
    async def run(self, task, session):
        task.extra["points"].append(100)
        task.messages[0]["content"] = "easier"
        return session.episode(Task(task.id, task.messages, label="what I said", extra=task.extra))


def worker_of(loop: type[AgentLoop], deadline_s: float = 600.0) -> LoopWorker:
    config = LoopConfig(type="test", deadline_s=deadline_s)
    return LoopWorker(loop(config), ScriptedEngine(ScriptedConfig(), Path()))


def roll_beside_others(tmp_path: Path, id: str, worker: LoopWorker) -> tuple[Episode, list[Episode]]:
    """The episode of the task with this id, and those of three others that run at the same time."""

    async def main():
        tasks = [Task(id, TASK.messages), *(Task(f"{n}", TASK.messages) for n in range(3))]
        async with World(tmp_path, None, worker=worker, sources={"t": tasks}, group_size=1) as world:
            groups = [world.env.open_group(prompt, 1) for prompt in world.env.tasks.prompts()]
            return await asyncio.gather(
                *(world.env.roll(group, trial) for group in groups for trial in group.in_flight.values())
            )

    episodes = {episode.task.id: episode for episode in asyncio.run(main())}
    return episodes.pop(id), list(episodes.values())


@pytest.mark.parametrize("how", ["blocks", "sleeps", "never yields", "sleeps in a task"])
def test_l16_a_loop_that_blocks_times_out_with_its_name_and_its_neighbours_do_not(tmp_path, caplog, how):
    blocking, episodes = roll_beside_others(tmp_path, how, worker_of(Blocking, 0.5))
    assert (blocking.outcome, blocking.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
    assert "Blocking.run blocked the event loop for " in blocking.reason
    assert Counter(episode.outcome for episode in episodes) == {Outcome.OK: 3}
    assert sum("Blocking.run blocked the event loop" in record.message for record in caplog.records) == 1


def test_l16_a_loop_whose_task_exits_costs_itself_only(tmp_path):
    leaving, episodes = roll_beside_others(tmp_path, "leaves", worker_of(Leaving))
    assert (leaving.outcome, leaving.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "SystemExit(3)" in leaving.reason
    assert Counter(episode.outcome for episode in episodes) == {Outcome.OK: 3}


class Spinning(AgentLoop):
    async def run(self, task, session):
        while task.id == "never yields":
            pass
        await asyncio.sleep(0.2)
        return session.episode(task)


def impatient_worker() -> LoopWorker:
    """Built in an actor, which then ends soon after it is blocked."""
    actor_host._PATIENCE_S = 0.0
    return worker_of(Spinning, 0.5)


@pytest.mark.usefixtures("cluster")
def test_l16_an_actor_that_is_blocked_for_ever_ends_long_before_the_engines_deadline():
    async def main():
        pool = pool_of(1, impatient_worker)
        await pool.start()
        try:
            kinds = ["never yields", "innocent", "innocent"]
            calls = (pool.call(RolloutRequest(Task(kind, TASK.messages), "0"), timeout_s=600.0) for kind in kinds)
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await pool.close()

    blocking, *innocent = asyncio.run(main())
    assert isinstance(blocking, EventLoopBlocked)
    assert "Spinning.run blocked the event loop of its worker, which was ended" in str(blocking)
    assert [episode.outcome for episode in innocent] == [Outcome.OK] * 2


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("workers", [0, 1])
def test_l16_a_loop_cannot_change_what_it_is_judged_by(tmp_path, caplog, workers):
    async def main():
        world = World(tmp_path, None, worker=worker_of(Changing), sources={"t": [TASK]}, group_size=2)
        if workers:
            world.env.loop = pool_of(workers, partial(worker_of, Changing))
        async with world:
            group = world.env.open_group(world.env.tasks.draw(), 2)
            await world.env.roll_all([group])
            return world.judge.judged

    episodes = asyncio.run(main())
    assert len(episodes) == 2
    for episode in episodes:
        assert episode.task == Task("t", ({"role": "user", "content": "1"},), label="1", extra={"points": [1]})
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(": ")[2] for text in warnings] == ["its loop changes the task; judgers see the original one"]


STUBBORN = """
import asyncio, logging, sys, time
from pathlib import Path
from loopwright.core import runtime
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
from loopwright.rollouts.loops import worker as worker_module
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.rollouts.pools.local import LocalPool
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.core.task import Task

async def ignore(ignored):
    while True:
        try:
            await asyncio.sleep(1e6)
        except ignored:
            pass

class Stubborn(AgentLoop):
    async def run(self, task, session):
        if task.id == "everything":
            await ignore(BaseException)
        if task.id == "subtask":
            await asyncio.gather(ignore(BaseException))
        while True:
            try:
                await (asyncio.to_thread(time.sleep, 1e6) if task.id == "thread" else asyncio.sleep(1e6))
            except asyncio.CancelledError:
                pass

async def main():
    worker = LoopWorker(Stubborn(LoopConfig(type="x", deadline_s=0.1)), ScriptedEngine(ScriptedConfig(), Path()))
    pool = LocalPool(lambda: worker, grace_s=0.1)
    await pool.start()
    for kind in ("thread", "task"):
        try:
            await pool.call(RolloutRequest(Task(kind, ({"role": "user", "content": ""},)), "0"), timeout_s=0.2)
        except TimeoutError:
            print("timeout")
    worker_module._GRACE_S = 0.1
    for kind in ("everything", "subtask"):
        try:
            await pool.call(RolloutRequest(Task(kind, ({"role": "user", "content": ""},)), "0"))
        except TimeoutError as error:
            logging.warning(f"{kind}: {error}")
    worker_module._GRACE_S = 1e6
    asyncio.ensure_future(pool.call(RolloutRequest(Task("task", ({"role": "user", "content": ""},)), "0")))
    await asyncio.sleep(0.1)
    await pool.close()

logging.basicConfig()
runtime._GRACE_S = 0.2
runtime.run(main())
print("ended")
"""


def test_l16_a_loop_that_ignores_cancellation_is_abandoned_and_named():
    result = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["timeout", "timeout", "ended"], result.stderr
    assert "calls of Stubborn.run ignored their cancellation" in result.stderr
    assert "threads that did not end within 0.2 s are abandoned: to_thread-0" in result.stderr
    for kind in ("everything", "subtask"):
        assert f"{kind}: not finished within 0.1 s; Stubborn.run ignored its cancellation for 0.1 s" in result.stderr
    assert "ignore ignored its cancellation for 0.2 s and is abandoned" in result.stderr
    assert "was destroyed" not in result.stderr
