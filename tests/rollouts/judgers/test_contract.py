"""The shipped judgers keep the contract that a plug-in's judger must keep."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.rollouts.judgers.command import CommandJudgerConfig
from loopwright.rollouts.judgers.composed import ComposedJudgerConfig
from loopwright.rollouts.judgers.facts import EnvironmentJudgerConfig, LengthJudgerConfig, VerifierJudgerConfig
from loopwright.rollouts.judgers.http import HttpJudgerConfig, LlmJudgerConfig
from loopwright.rollouts.judgers.python import PythonJudgerConfig
from loopwright.rollouts.judgers.ranking import RankingJudgerConfig
from loopwright.testing import JudgerContract
from tests.rollouts.judge_servers import serving

FUNCTIONS = "tests.rollouts.judge_functions"
SCRIPTS = {
    "score": "import json; p = json.load(open('payload.json')); raise SystemExit(p['answer'] != p['label'])",
    "fail": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "import time; time.sleep(1000)",
}


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


class TestPython(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        return PythonJudgerConfig(function=f"{FUNCTIONS}:{ {'score': 'exact'}.get(behaviour, behaviour) }", **settings)


class TestPythonAsynchronous(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        function = {"score": "exact_async", "fail": "fail", "hang": "hang_async"}[behaviour]
        return PythonJudgerConfig(function=f"{FUNCTIONS}:{function}", **settings)


class TestPythonInBatches(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        function = {"score": "exact_each"}.get(behaviour, behaviour)
        return PythonJudgerConfig(function=f"{FUNCTIONS}:{function}", batch=4, **settings)


class TestHttp(JudgerContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.url = server.url

    def make_config(self, directory, behaviour, **settings):
        place = {"score": "judge", "fail": "answer?text=%7B%22reward%22:1%7D&status=500", "hang": "hang"}[behaviour]
        return HttpJudgerConfig(url=f"{self.url}/{place}", **settings)


class TestHttpInBatches(TestHttp):
    def make_config(self, directory, behaviour, **settings):
        return super().make_config(directory, behaviour, batch=4, **settings)


class TestLlm(JudgerContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.url = server.url

    def make_config(self, directory, behaviour, **settings):
        place = {"score": "chat/exact", "fail": "chat/It deserves a ten", "hang": "hang"}[behaviour]
        return LlmJudgerConfig(base_url=f"{self.url}/{place}", model="judge", rubric="Is it right?", **settings)


class TestCommand(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        return CommandJudgerConfig(command=(sys.executable, "-IS", "-c", SCRIPTS[behaviour]), **settings)


class TestLength(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        return LengthJudgerConfig(**settings) if behaviour == "score" else None


class TestComposed(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        first = {"type": "python", "function": f"{FUNCTIONS}:{ {'score': 'exact'}.get(behaviour, behaviour) }"}
        return ComposedJudgerConfig(parts=(first, {"type": "length", "weight": -0.01}), **settings)


class TestMerged(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        first = {"type": "python", "function": f"{FUNCTIONS}:{ {'score': 'exact'}.get(behaviour, behaviour) }"}
        return ComposedJudgerConfig(parts=(first, {"type": "length"}), merge=f"{FUNCTIONS}:smaller", **settings)


class TestRouted(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        function = f"{FUNCTIONS}:{ {'score': 'exact'}.get(behaviour, behaviour) }"
        return ComposedJudgerConfig(routes={"sums": {"type": "python", "function": function}}, **settings)


class TestRanking(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        function = {"score": "shortest", "fail": "fail_group", "hang": "hang_group"}[behaviour]
        return RankingJudgerConfig(function=f"{FUNCTIONS}:{function}", **settings)


class TestRanks(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        inner = {"score": "exact"}.get(behaviour, behaviour)
        own = {key: settings.pop(key) for key in ("timeout_s", "retries", "pause_s") if key in settings}
        return RankingJudgerConfig(of={"type": "python", "function": f"{FUNCTIONS}:{inner}", **own}, **settings)


class TestComposedWithAGroupJudger(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        group = {"score": "shortest", "fail": "fail_group", "hang": "hang_group"}[behaviour]
        ranking = {"type": "ranking", "function": f"{FUNCTIONS}:{group}"}
        return ComposedJudgerConfig(parts=(ranking, {"type": "length", "weight": -0.01}), **settings)


class TestVerifier(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        if behaviour == "hang":
            return None
        return VerifierJudgerConfig(reward={"score": "correct", "fail": "missing"}[behaviour], **settings)

    def make_episode(self, answer="4"):
        rewards = {"correct": float(answer == "4"), "lines": 3}
        return replace(super().make_episode(answer), evidence={"verifier": {"rewards": rewards}})


class TestEnvironment(JudgerContract):
    def make_config(self, directory, behaviour, **settings):
        if behaviour == "hang":
            return None
        return EnvironmentJudgerConfig(reward={"score": "correct", "fail": "missing"}[behaviour], **settings)

    def make_episode(self, answer="4"):
        score = {"reward": 9.0, "parts": {"correct": float(answer == "4"), "lines": 3}}
        return replace(super().make_episode(answer), evidence={"agent": {"returned": score}})


def test_every_shipped_judger_is_tested():
    from loopwright.rollouts.judgers.base import judgers

    text = Path(__file__).read_text()
    assert [name for name in judgers.names() if f"{judgers.get(name).Config.__name__}(" not in text] == []
