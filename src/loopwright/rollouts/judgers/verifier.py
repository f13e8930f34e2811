"""The verifier judger: what a task's own tests said, after the agent was gone."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload
from loopwright.rollouts.judgers.verdict_parsing import as_reward

_NAME = "reward"


class VerifierJudgerConfig(JudgerConfig):
    """The reward that the task's `tests/test.sh` left in reward.json or reward.txt."""

    type: Literal["verifier"] = "verifier"
    reward: str | None = None
    """Which of the named rewards counts; without it `reward` where there is one, and otherwise their sum."""
    broken: float | None = None
    """The reward where the tests run out of time, break a bound, or are ended by a signal and leave no reward: set it
    where that is the agent's own doing, because they run its code and do not stop it themselves. Without it there is no
    reward then."""
    retries: int = Field(default=0, ge=0)
    """How often a failed verdict is tried again; what tests said does not change by asking again."""
    breaker: int = Field(default=0, ge=0)
    """After so many failures in a row the judger counts as down; never, since it asks nobody."""

    def evidence(self) -> set[str]:
        return {"verifier"}

    def lacks(self, task: Task) -> str:
        if not task.extra.get("local_task_path") and not task.extra.get("instance_id"):
            return "neither local_task_path nor instance_id says where its tests are"
        return "its directory has no tests/test.sh" if task.extra.get("tested") is False else ""


class VerifierJudger(Judger):
    """Reads what the loop brought home; broken tests are a failed verdict and never a zero."""

    Config: ClassVar[type[JudgerConfig]] = VerifierJudgerConfig
    config: VerifierJudgerConfig
    needs = ("evidence",)

    async def judge(self, payload: Payload) -> Reward:
        said: Any = payload.evidence.get("verifier")
        if not isinstance(said, Mapping):
            raise JudgeFailed("no tests were run: only loop type 'remote' runs a task's tests/test.sh")
        if "error" in said:
            if self.config.broken is not None and said.get("stopped"):
                return as_reward(self.config.broken, self.config.label())
            raise JudgeFailed(f"the task's tests are broken: {said['error']}{_last(said)}")
        parts = as_reward(dict(said["rewards"]), self.config.label())
        chosen = self.config.reward or (_NAME if _NAME in parts.parts else None)
        if chosen is None:
            return parts
        if chosen not in parts.parts:
            known = ", ".join(parts.parts)
            raise JudgeFailed(f"the task's tests gave no {chosen!r}, only {known}: set `reward` to one of these")
        return Reward(parts.parts[chosen], parts.parts)


def _last(said: Mapping[str, Any]) -> str:
    lines = str(said.get("output", "")).splitlines()
    return f" (it last printed: {lines[-1][:200]})" if lines else ""
