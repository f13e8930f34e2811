"""The ranking judger: the episodes of a group are compared with one another."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from loopwright.core.errors import Problem, sentence
from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.batch import one_each
from loopwright.rollouts.judgers.guard import judge_all
from loopwright.rollouts.judgers.handler import Handler
from loopwright.rollouts.judgers.needs import Needs
from loopwright.rollouts.judgers.parse import AnyJudger
from loopwright.rollouts.judgers.python import PATH
from loopwright.rollouts.judgers.verdict_parsing import as_reward
from loopwright.rollouts.judgers.worker import build_judger


class RankingJudgerConfig(JudgerConfig):
    """A group judger: a function over the group, or the ranks of another judger's verdicts."""

    type: Literal["ranking"] = "ranking"
    function: str | None = Field(default=None, pattern=PATH)
    """`module:function` that is given a list of payloads, one per episode, with what `needs` names as attributes; it
    returns a number for each of them."""
    of: AnyJudger | None = None
    """Instead of a function: a judger whose verdicts are ranked. The best is 1, the worst 0, equals share a rank."""
    needs: Needs = ("answer", "label")
    """What the function is given of each episode."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if (self.function is None) == (self.of is None):
            raise ValueError("a ranking judger has either a `function` or another judger to rank, `of`")
        return self

    def label(self) -> str:
        return self.name or (self.function or "").rpartition(":")[2].rpartition(".")[2] or self.type

    def problems(self, home: Path) -> list[Problem]:
        if self.of is not None:
            return [Problem(f"of.{problem.key}", problem.message) for problem in self.of.problems(home)]
        try:
            Handler(str(self.function), home).takes_one()
        except (ImportError, TypeError, ValueError) as error:
            return [Problem("function", f"{self.function!r}: {sentence(error)}")]
        return []

    def unjudged(self, data_sources: Iterable[str]) -> list[Problem]:
        found = self.of.unjudged(data_sources) if self.of is not None else []
        return [Problem(f"of.{problem.key}", problem.message) for problem in found]

    def evidence(self) -> set[str]:
        return self.of.evidence() if self.of is not None else set()

    def lacks(self, task: Task) -> str:
        return self.of.lacks(task) if self.of is not None else ""

    def patience_s(self) -> float:
        return super().patience_s() if self.of is None else self.of.patience_s()

    def room(self) -> int:
        return self.concurrency if self.of is None else min(self.concurrency, self.of.room())


class RankingJudger(Judger):
    """Compares a group."""

    Config: ClassVar[type[JudgerConfig]] = RankingJudgerConfig
    config: RankingJudgerConfig
    compares = True

    def __init__(self, config: RankingJudgerConfig, home: Path) -> None:
        super().__init__(config, home)
        self._of = build_judger(config.of, home) if config.of is not None else None
        self._handler = Handler(config.function, home, threads=config.concurrency) if config.function else None
        self.delegates = self._of is not None
        self.needs = config.needs if self._of is None else self._of.needs

    async def judge(self, payload: Payload) -> Reward:
        raise JudgeFailed(f"judger {self.config.label()!r} compares a group; one episode alone has no rank")

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        if self._of is not None:
            return ranked(await judge_all(self._of, payloads))
        if self._handler is None:
            raise JudgeFailed("there is nothing to rank by")
        values: Any = await self._handler([payload.only(self.needs) for payload in payloads])
        name = self.config.label()
        return [as_reward(value, name) for value in one_each(values, name, len(payloads))]

    async def close(self) -> None:
        if self._of is not None:
            await self._of.close()
        if self._handler is not None:
            self._handler.close()


def ranked(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Ranks from 0 to 1 among the verdicts that were given; equals share theirs, and so 0.5 where all are equal."""
    values = [verdict.value for verdict in verdicts if isinstance(verdict, Reward)]
    found: list[Verdict] = []
    for verdict in verdicts:
        if isinstance(verdict, JudgeFailed):
            found.append(verdict)
            continue
        below = sum(value < verdict.value for value in values)
        equal = sum(value == verdict.value for value in values) - 1
        others = len(values) - 1
        found.append(Reward((below + equal / 2) / others if others else 0.5))
    return found
