"""P02 with a real model: an engine at a tenth of its speed changes no reward, only the time."""

import asyncio
import json

import pytest

import loopwright
from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Sampling
from loopwright.engines.fleet import Fleet, FleetConfig
from loopwright.engines.scripted import ScriptedConfig
from loopwright.gateway.sessions.session import Session
from loopwright.ledger.ledger import Ledger
from loopwright.testing import simulate

TRIALS, TOKENS, DEADLINE_S = 6, 8, 2.0
ENGINE = """
import time

from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine


class SlowConfig(TransformersConfig):
    type: str = "slow_engine:Slow"
    slowdown: int = 1
    least_s: float = 0.0


class Slow(TransformersEngine):
    Config = SlowConfig

    def __init__(self, config, scenario_dir):
        super().__init__(config, scenario_dir)
        step = self.batch.step

        def slow_step(version):
            start = time.thread_time()  # what others do on this machine does not count ten times
            chunks = step(version)
            time.sleep(max(config.least_s, time.thread_time() - start) * (config.slowdown - 1))
            return chunks

        self.batch.step = slow_step


def length(answer):
    return float(len(answer))
"""


def rewards(directory, model, slowdown):
    """The reward of each trial, and the seconds that its engine needed."""
    directory.mkdir()
    (directory / "slow_engine.py").write_text(ENGINE)
    tasks = [{"id": f"t{n}", "prompt": f"Say {n}.", "label": n} for n in range(TRIALS)]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    # Two at a time: the others wait in the engine's queue for longer than their deadline.
    engine = {"type": "slow_engine:Slow", "model": model, "threads": 1, "max_batch": 2}
    # The patience of a busy machine: a rollout that its engine has lost is sampled again, with another seed.
    loop = {
        "type": "single_turn",
        "deadline_s": DEADLINE_S,
        "engine_timeout_s": 500.0,
        "sampling": {"max_tokens": TOKENS},
    }
    run = {
        "name": "answers",
        "agent": {"type": "collect", "trials": TRIALS, "group_size": 1, "seed": 3},
        "engine": {**engine, "slowdown": slowdown, "least_s": 0.03},
        "rollout": {
            "tasks": {"type": "jsonl", "path": "tasks.jsonl"},
            "loop": loop,
            "judger": {"type": "python", "function": "slow_engine:length"},
        },
    }
    loopwright.run({"name": "slow", "home": str(directory), "run": [run]}, output=directory / "out")
    with Ledger.read(directory / "out/answers/ledger.db") as ledger:
        trials = list(ledger.trials())
        episodes = [Episode.from_bytes(ledger.payload(trial.number, "rollout")) for trial in trials]
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.TRUNCATED}, [trial.reason for trial in trials]
    return {trial.number: trial.reward.value for trial in trials}, [
        e.attempts[-1].phases_s["generate"] for e in episodes
    ]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_p02_a_real_model_at_a_tenth_of_its_speed_changes_no_reward(tmp_path, model):
    fast, _ = rewards(tmp_path / "fast", model, 1)
    slow, engine_s = rewards(tmp_path / "slow", model, 10)
    assert slow == fast
    assert max(engine_s) > DEADLINE_S


def test_p02_views_of_an_engine_share_its_activity(tmp_path):
    """A session that waits in the queue of a busy engine does not call it silent."""

    async def main():
        engine = Fleet(FleetConfig(engines=(ScriptedConfig(replies=("a",)),)), tmp_path)
        sessions = [Session(engine.for_session(str(n)), Sampling(), seed=str(n)) for n in range(2)]
        waiting = asyncio.ensure_future(_hold(sessions[0]))
        await asyncio.sleep(50)
        await sessions[1].sample(sessions[1].draft([{"role": "user", "content": "hi"}]))
        now = asyncio.get_running_loop().time()
        silences = [sessions[0].silent_s(now + 5)]
        await engine.pause()
        silences.append(sessions[0].silent_s(now + 500))
        waiting.cancel()
        await engine.close()
        return silences

    assert simulate(main()) == [5, 0]


async def _hold(session):
    with session.phase("generate"):
        await asyncio.sleep(1000)
