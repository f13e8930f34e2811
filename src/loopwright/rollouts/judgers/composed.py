"""The composed judger: several judgers under one rule, a weighted sum, a merge function, or a route per data source."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from loopwright.core.config import FUNCTION
from loopwright.core.errors import Problem, did_you_mean, sentence
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import (
    AnyJudger,
    BaseJudger,
    GroupJudger,
    JudgeFailed,
    JudgerConfig,
    Payload,
    Verdict,
)
from loopwright.rollouts.judgers.guard import BuildPart, Guard, GuardedJudger, build_judger
from loopwright.rollouts.judgers.python import UserFunction
from loopwright.rollouts.judgers.verdict_parsing import add_rewards, as_reward

_INHERITED = ("timeout_s", "retries", "pause_s", "breaker", "cooldown_s", "concurrency")
_DEFAULT_ROUTE = "*"


class ComposedJudgerConfig(JudgerConfig):
    """Several judgers. Parts that do not set a timeout, retries or concurrency inherit them."""

    type: Literal["composed"] = "composed"
    parts: tuple[AnyJudger, ...] = ()
    """Judgers whose weighted rewards are added up; each is a named part of the reward."""
    routes: Mapping[str, AnyJudger] = Field(default_factory=dict)
    """Instead of parts: a judger per `data_source` of the tasks; `"*"` is for all others."""
    merge: str | None = Field(default=None, pattern=FUNCTION)
    """With parts: `module:function` that takes a dict of their rewards by name, instead of adding them up."""

    @model_validator(mode="after")
    def _check_one_rule(self) -> Self:
        if bool(self.parts) == bool(self.routes):
            raise ValueError("a composed judger has either `parts` or `routes`")
        if self.merge is not None and not self.parts:
            raise ValueError("`merge` needs `parts`")
        labels = [part.label() for part in self.parts]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{labels.count(label)} parts are called {label!r}; give each a `name`")
            if self.merge is not None and self.parts[labels.index(label)].weight != 1.0:
                raise ValueError(f"part {label!r} has a weight, but `merge` combines the parts; weigh it there")
        for member in self.members().values():
            if self.workers and any(part.workers for part in member.placements("").values()):
                raise ValueError(
                    f"{member.label()!r} has `workers`, and so has the composed judger; set them on one of the two"
                )
        return self

    def members(self) -> dict[str, JudgerConfig]:
        """The judgers that it consists of by their keys, with the settings that they inherit."""
        inherited = {name: getattr(self, name) for name in _INHERITED if name in self.model_fields_set}
        members = {f"routes.{source}": judger for source, judger in self.routes.items()}
        members |= {f"parts[{index}]": part for index, part in enumerate(self.parts)}
        return {
            key: member.model_copy(
                update={name: value for name, value in inherited.items() if name not in member.model_fields_set}
            )
            for key, member in members.items()
        }

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = [
            Problem(f"{key}.{problem.key}", problem.message)
            for key, member in self.members().items()
            for problem in member.problems(scenario_dir)
        ]
        if self.merge is not None:
            try:
                UserFunction.load(self.merge, scenario_dir).check_one_argument()
            except (ImportError, TypeError, ValueError) as error:
                problems.append(Problem("merge", f"{self.merge!r}: {sentence(error)}"))
        return problems

    def routing_problems(self, data_sources: Iterable[str]) -> list[Problem]:
        if not self.routes:
            sources = list(data_sources)
            return [
                Problem(f"parts[{index}].{problem.key}", problem.message)
                for index, part in enumerate(self.parts)
                for problem in part.routing_problems(sources)
            ]
        if _DEFAULT_ROUTE in self.routes:
            return []
        missing = [source for source in dict.fromkeys(data_sources) if source not in self.routes]
        return [Problem("routes", _missing_route(source, self.routes)) for source in missing]

    def required_evidence(self) -> set[str]:
        return {name for member in self.members().values() for name in member.required_evidence()}

    def task_problem(self, task: Task) -> str:
        route = self.routes.get(task.data_source) or self.routes.get(_DEFAULT_ROUTE)
        judgers = self.parts if not self.routes else (route,) if route is not None else ()
        return next((problem for judger in judgers if (problem := judger.task_problem(task))), "")

    def total_timeout_s(self) -> float:
        merge_s = super().total_timeout_s() if self.merge is not None else 0.0
        return max(member.total_timeout_s() for member in self.members().values()) + merge_s

    def capacity(self) -> int:
        members = self.members().values()
        return min(self.concurrency, *(member.capacity() * max(1, member.workers) for member in members))


class ComposedJudger(GroupJudger):
    """Asks its parts at the same time. If one gives no verdict, the whole has none: a gap is not a zero."""

    Config: ClassVar[type[JudgerConfig]] = ComposedJudgerConfig
    config: ComposedJudgerConfig
    combines = True

    @classmethod
    def build(
        cls, config: ComposedJudgerConfig, scenario_dir: Path, build_part: BuildPart = build_judger
    ) -> BaseJudger:
        return (RoutedJudger if config.routes else cls)(config, scenario_dir, build_part)

    def __init__(
        self, config: ComposedJudgerConfig, scenario_dir: Path = Path(), build_part: BuildPart = build_judger
    ) -> None:
        super().__init__(config, scenario_dir)
        parts = [build_part(part, scenario_dir) for part in config.members().values()]
        self._parts = {part.config.label(): part for part in parts}
        self.needs = tuple(dict.fromkeys(need for part in parts for need in part.needs))
        self.compares = any(part.compares for part in parts)
        load = partial(UserFunction.load, scenario_dir=scenario_dir, threads=config.concurrency)
        self._merge = load(config.merge) if config.merge else None
        self._guard = Guard(config)

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        columns = await asyncio.gather(*(_judge(part, payloads) for part in self._parts.values()))
        rows = (dict(zip(self._parts, row, strict=True)) for row in zip(*columns, strict=True))
        return list(await asyncio.gather(*map(self._combine, rows)))

    async def _combine(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        rewards: dict[str, Reward] = {}
        for label, verdict in verdicts.items():
            if isinstance(verdict, JudgeFailed):
                return verdict
            rewards[label] = verdict
        name = self.config.label()
        try:
            if self._merge is None:
                return add_rewards(rewards, name)
            values = {label: reward.value for label, reward in rewards.items()}
            merged = as_reward(await self._guard.run(partial(self._merge, dict(values))), name)
        except JudgeFailed as error:
            return error
        # A bare number keeps the parts that it was made from.
        return Reward(merged.value, values) if list(merged.parts) == [name] else merged

    async def close(self) -> None:
        if self._merge is not None:
            self._merge.close()
        await asyncio.gather(*(part.close() for part in self._parts.values()))


class RoutedJudger(GroupJudger):
    """Chooses a judger by the task's data source."""

    Config: ClassVar[type[JudgerConfig]] = ComposedJudgerConfig
    config: ComposedJudgerConfig
    combines = True

    def __init__(
        self, config: ComposedJudgerConfig, scenario_dir: Path = Path(), build_part: BuildPart = build_judger
    ) -> None:
        super().__init__(config, scenario_dir)
        judgers = [build_part(judger, scenario_dir) for judger in config.members().values()]
        self._routes = dict(zip(config.routes, judgers, strict=True))
        self.needs = tuple(dict.fromkeys([*(need for judger in judgers for need in judger.needs), "data_source"]))
        self.compares = any(judger.compares for judger in judgers)

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        indices_by_source: dict[str, list[int]] = {}
        for index, payload in enumerate(payloads):
            indices_by_source.setdefault(payload.data_source, []).append(index)
        verdicts: dict[int, Verdict] = {}
        for source, indices in indices_by_source.items():
            judger = self._routes.get(source) or self._routes.get(_DEFAULT_ROUTE)
            if judger is None:
                failure = JudgeFailed(f"judger {self.config.label()!r} has {_missing_route(source, self._routes)}")
                verdicts.update(dict.fromkeys(indices, failure))
            else:
                verdicts.update(zip(indices, await _judge(judger, [payloads[i] for i in indices]), strict=True))
        return [verdicts[index] for index in range(len(payloads))]

    async def close(self) -> None:
        await asyncio.gather(*(judger.close() for judger in self._routes.values()))


async def _judge(judger: GuardedJudger, payloads: Sequence[Payload]) -> list[Verdict]:
    return await judger.judge_group([payload.only(judger.needs) for payload in payloads])


def _missing_route(source: str, routes: Mapping[str, object]) -> str:
    return f"no route for data_source {source!r}. {did_you_mean(source, list(routes))}"
