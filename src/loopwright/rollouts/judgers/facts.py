"""Judgers that call nothing: they read a fact of the episode, such as its length or the results of the task's tests."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.errors import did_you_mean
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload
from loopwright.rollouts.judgers.verdict_parsing import as_reward


class LengthJudgerConfig(JudgerConfig):
    """The number of tokens that the policy sampled, for penalties: `weight = -0.01`."""

    type: Literal["length"] = "length"


class LengthJudger(Judger):
    """Counts sampled tokens."""

    Config: ClassVar[type[JudgerConfig]] = LengthJudgerConfig
    needs = ("tokens",)

    async def judge(self, payload: Payload) -> Reward:
        return Reward(float(payload.tokens))


class VerifierJudgerConfig(JudgerConfig):
    """The reward that the task's `tests/test.sh` left in reward.json or reward.txt."""

    type: Literal["verifier"] = "verifier"
    reward: str | None = None
    """Which of the named rewards counts; without it `reward` if there is one, and otherwise their sum."""
    broken: float | None = None
    """The reward if the tests time out, exceed a limit, or are killed by a signal and leave no reward. Set it if the
    agent can cause that, because the tests run its code and do not stop it themselves. Without it, the
    reward is missing."""
    retries: int = Field(default=0, ge=0)
    """How often a failed verdict is attempted again; test results do not change, so once is enough."""
    breaker: int = Field(default=0, ge=0)
    """After this many consecutive failures the judger counts as down; never, since it calls nothing."""

    def required_evidence(self) -> set[str]:
        return {"verifier"}

    def task_problem(self, task: Task) -> str:
        if not task.extra.get("local_task_path") and not task.extra.get("instance_id"):
            return "it has neither local_task_path nor instance_id, which locate its tests"
        return "its directory has no tests/test.sh" if task.extra.get("tested") is False else ""


class VerifierJudger(Judger):
    """Reads the test results that the loop recorded. Broken tests give no verdict, never a zero."""

    Config: ClassVar[type[JudgerConfig]] = VerifierJudgerConfig
    config: VerifierJudgerConfig
    needs = ("evidence",)

    async def judge(self, payload: Payload) -> Reward:
        results: Any = payload.evidence.get("verifier")
        label = self.config.label()
        if not isinstance(results, Mapping):
            raise JudgeFailed("no tests were run: only loop type 'remote' runs a task's tests/test.sh")
        if "error" in results:
            if self.config.broken is not None and results.get("stopped"):
                return as_reward(self.config.broken, label)
            lines = str(results.get("output", "")).splitlines()
            last_line = f" (last line of output: {lines[-1][:200]})" if lines else ""
            raise JudgeFailed(f"the task's tests are broken: {results['error']}{last_line}")
        if results.get("is_forfeit"):
            return as_reward(0.0, label)
        total = as_reward(dict(results["rewards"]), label)
        name = self.config.reward or ("reward" if "reward" in total.parts else None)
        if name is None:
            return total
        if name not in total.parts:
            names = ", ".join(total.parts)
            raise JudgeFailed(f"the task's tests gave no reward {name!r}, only {names}; set `reward` to one of these")
        return Reward(total.parts[name], total.parts)


class EnvironmentJudgerConfig(JudgerConfig):
    """The score that the environment itself gave: the rubric of verifiers, the scorers of Inspect."""

    type: Literal["environment"] = "environment"
    reward: str | None = None
    """Which of its parts counts; without it, their sum."""
    retries: int = Field(default=0, ge=0)
    """How often a failed verdict is attempted again; the score is recorded already, so once is enough."""
    breaker: int = Field(default=0, ge=0)
    """After this many consecutive failures the judger counts as down; never, since it calls nothing."""


class EnvironmentJudger(Judger):
    """Reads the score that the loop recorded. A score that failed gives no verdict, never a zero."""

    Config: ClassVar[type[JudgerConfig]] = EnvironmentJudgerConfig
    config: EnvironmentJudgerConfig
    needs = ("evidence",)

    async def judge(self, payload: Payload) -> Reward:
        score: Any = payload.evidence.get("agent", {}).get("returned")
        if not isinstance(score, Mapping) or not score.keys() & {"reward", "error"}:
            raise JudgeFailed("the environment gave no score")
        if "error" in score:
            raise JudgeFailed(str(score["error"]))
        parts, name = score.get("parts", {}), self.config.reward
        if name is not None and name not in parts:
            raise JudgeFailed(f"the environment gave no part {name!r}. {did_you_mean(name, list(parts))}")
        return as_reward(Reward(score["reward"] if name is None else parts[name], parts), self.config.label())
