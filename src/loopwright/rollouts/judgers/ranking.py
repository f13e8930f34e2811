"""The ranking judger: compares the episodes of a group with one another."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from loopwright.core.config import FUNCTION
from loopwright.core.errors import Problem, sentence
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import (
    AnyJudger,
    BaseJudger,
    GroupJudger,
    JudgeFailed,
    JudgerConfig,
    Needs,
    Payload,
    Verdict,
)
from loopwright.rollouts.judgers.guard import BuildPart, GuardedJudger, build_judger
from loopwright.rollouts.judgers.python import UserFunction
from loopwright.rollouts.judgers.verdict_parsing import as_reward, check_entries


class RankingJudgerConfig(JudgerConfig):
    """A group judger: a function over the group, or the ranks of another judger's rewards."""

    type: Literal["ranking"] = "ranking"
    function: str | None = Field(default=None, pattern=FUNCTION)
    """`module:function` that takes a list of payloads, one per episode, with the facts of `needs` as attributes, and
    returns a number for each of them."""
    of: AnyJudger | None = None
    """Instead of a function: a judger whose rewards are ranked. The best is 1, the worst 0, equals share a rank."""
    needs: Needs = ("answer", "label")
    """The facts of each episode that the function is given."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.function is None) == (self.of is None):
            raise ValueError("a ranking judger has either a `function` or another judger to rank, `of`")
        if self.of is not None and self.workers and any(part.workers for part in self.of.placements("").values()):
            raise ValueError("`of` has `workers`, and so has the ranking judger; set them on one of the two")
        return self

    def members(self) -> dict[str, JudgerConfig]:
        return {} if self.of is None else {"of": self.of}

    def label(self) -> str:
        return self.name or (self.function or "").rpartition(":")[2].rpartition(".")[2] or self.type

    def problems(self, scenario_dir: Path) -> list[Problem]:
        if self.of is not None:
            return [Problem(f"of.{problem.key}", problem.message) for problem in self.of.problems(scenario_dir)]
        try:
            UserFunction.load(str(self.function), scenario_dir).check_one_argument()
        except (ImportError, TypeError, ValueError) as error:
            return [Problem("function", f"{self.function!r}: {sentence(error)}")]
        return []

    def routing_problems(self, data_sources: Iterable[str]) -> list[Problem]:
        problems = self.of.routing_problems(data_sources) if self.of is not None else []
        return [Problem(f"of.{problem.key}", problem.message) for problem in problems]

    def required_evidence(self) -> set[str]:
        return self.of.required_evidence() if self.of is not None else set()

    def task_problem(self, task: Task) -> str:
        return self.of.task_problem(task) if self.of is not None else ""

    def total_timeout_s(self) -> float:
        return super().total_timeout_s() if self.of is None else self.of.total_timeout_s()

    def capacity(self) -> int:
        if self.of is None:
            return self.concurrency
        return min(self.concurrency, self.of.capacity() * max(1, self.of.workers))


class RankingJudger(GroupJudger):
    """Ranks the rewards of another judger."""

    Config: ClassVar[type[JudgerConfig]] = RankingJudgerConfig
    combines = True

    @classmethod
    def build(cls, config: RankingJudgerConfig, scenario_dir: Path, build_part: BuildPart = build_judger) -> BaseJudger:
        if config.of is not None:
            return cls(config, build_part(config.of, scenario_dir))
        threads = config.concurrency
        return RankingFunctionJudger(config, UserFunction.load(str(config.function), scenario_dir, threads=threads))

    def __init__(self, config: RankingJudgerConfig, judger: GuardedJudger) -> None:
        super().__init__(config)
        self._judger, self.needs = judger, judger.needs

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        return rank(await self._judger.judge_group(payloads))

    async def close(self) -> None:
        await self._judger.close()


class RankingFunctionJudger(GroupJudger):
    """Calls a user's function with the whole group."""

    Config: ClassVar[type[JudgerConfig]] = RankingJudgerConfig

    def __init__(self, config: RankingJudgerConfig, function: UserFunction) -> None:
        super().__init__(config)
        self._function, self.needs = function, config.needs

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        values = await self._function([payload.only(self.needs) for payload in payloads])
        name = self.config.label()
        return [as_reward(value, name) for value in check_entries(values, name, len(payloads))]

    async def close(self) -> None:
        self._function.close()


def rank(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Ranks from 0 to 1 among the rewards. Equal ones share a rank: 0.5 if all are equal. Failures stay failures."""
    values = [verdict.value for verdict in verdicts if isinstance(verdict, Reward)]
    ranks: list[Verdict] = []
    for verdict in verdicts:
        if isinstance(verdict, JudgeFailed):
            ranks.append(verdict)
            continue
        below = sum(value < verdict.value for value in values)
        equal = sum(value == verdict.value for value in values) - 1
        others = len(values) - 1
        ranks.append(Reward((below + equal / 2) / others if others else 0.5))
    return ranks
