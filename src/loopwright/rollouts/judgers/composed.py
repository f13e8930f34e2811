"""The composed judger: several judgers under one rule: a weighted sum, a merge function, or a route per data source."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from loopwright.core.errors import Problem, did_you_mean, sentence
from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.guard import Guard, Guarded, judge_all
from loopwright.rollouts.judgers.handler import Handler
from loopwright.rollouts.judgers.parse import AnyJudger
from loopwright.rollouts.judgers.python import PATH
from loopwright.rollouts.judgers.verdict_parsing import added, as_reward
from loopwright.rollouts.judgers.worker import build_judger

_HANDED_DOWN = ("timeout_s", "retries", "pause_s", "breaker", "cooldown_s", "concurrency")
OTHERWISE = "*"


class ComposedJudgerConfig(JudgerConfig):
    """Several judgers. Its timeout, retries and concurrency are those of each part that says nothing else."""

    type: Literal["composed"] = "composed"
    parts: tuple[AnyJudger, ...] = ()
    """Judgers whose verdicts are added up, each times its weight; a named part of the reward each."""
    routes: Mapping[str, AnyJudger] = Field(default_factory=dict)
    """Instead of parts: a judger per `data_source` of the tasks; `"*"` is for those that are not listed."""
    merge: str | None = Field(default=None, pattern=PATH)
    """With parts: `module:function` that is given a dict of their verdicts by name, instead of adding them up."""

    @model_validator(mode="after")
    def _has_one_rule(self) -> Self:
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
        for part in self.members():
            if part.workers:
                raise ValueError(
                    f"{part.label()!r} has `workers`; give them to the composed judger, it moves as a whole"
                )
        return self

    def members(self) -> list[JudgerConfig]:
        """The judgers that it consists of, with what they take over from it."""
        return list(self._handed_down().values())

    def _handed_down(self) -> dict[str, JudgerConfig]:
        given = {name: getattr(self, name) for name in _HANDED_DOWN if name in self.model_fields_set}
        named = dict(self.routes) or {f"parts[{index}]": part for index, part in enumerate(self.parts)}
        return {
            key: part.model_copy(update={n: value for n, value in given.items() if n not in part.model_fields_set})
            for key, part in named.items()
        }

    def problems(self, home: Path) -> list[Problem]:
        found = []
        for key, part in self._handed_down().items():
            where = f"routes.{key}" if self.routes else key
            found += [Problem(f"{where}.{problem.key}", problem.message) for problem in part.problems(home)]
        if self.merge is not None:
            try:
                Handler(self.merge, home).takes_one()
            except (ImportError, TypeError, ValueError) as error:
                found.append(Problem("merge", f"{self.merge!r}: {sentence(error)}"))
        return found

    def unjudged(self, data_sources: Iterable[str]) -> list[Problem]:
        if not self.routes:
            names = list(data_sources)
            parts = [(index, part.unjudged(names)) for index, part in enumerate(self.parts)]
            return [Problem(f"parts[{index}].{p.key}", p.message) for index, found in parts for p in found]
        names = [
            name for name in dict.fromkeys(data_sources) if name not in self.routes and OTHERWISE not in self.routes
        ]
        return [
            Problem("routes", f"no route for data_source {n!r}. {did_you_mean(n, list(self.routes))}") for n in names
        ]

    def evidence(self) -> set[str]:
        return {name for part in self.members() for name in part.evidence()}

    def lacks(self, task: Task) -> str:
        mine = self.routes.get(task.data_source) or self.routes.get(OTHERWISE)
        judging = self.parts if not self.routes else (mine,) if mine is not None else ()
        return next((lack for part in judging if (lack := part.lacks(task))), "")

    def patience_s(self) -> float:
        own_s = super().patience_s() if self.merge is not None else 0.0
        return max(part.patience_s() for part in self.members()) + own_s

    def room(self) -> int:
        return min(self.concurrency, *(part.room() for part in self.members()))


class ComposedJudger(Judger):
    """Asks its parts at the same time. One that gives no verdict leaves none for the whole: a gap is not a zero."""

    Config: ClassVar[type[JudgerConfig]] = ComposedJudgerConfig
    config: ComposedJudgerConfig
    delegates = True

    def __init__(self, config: ComposedJudgerConfig, home: Path) -> None:
        super().__init__(config, home)
        built = [build_judger(part, home) for part in config.members()]
        self._routes = dict(zip(config.routes, built, strict=False))
        self._parts = {} if config.routes else {part.config.label(): part for part in built}
        needs = [need for part in built for need in part.needs]
        self.needs = tuple(dict.fromkeys([*needs, "data_source"] if config.routes else needs))
        self.compares = any(part.compares for part in built)
        self._merge = Handler(config.merge, home, threads=config.concurrency) if config.merge else None
        self._guard = Guard(config)

    async def judge(self, payload: Payload) -> Reward:
        if self.compares:
            raise JudgeFailed(f"judger {self.config.label()!r} compares a group; one episode alone has no rank")
        (verdict,) = await self.judge_group([payload])
        if isinstance(verdict, JudgeFailed):
            raise verdict
        return verdict

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        if self._routes:
            return await self._routed(payloads)
        columns = await asyncio.gather(*(_ask(part, payloads) for part in self._parts.values()))
        rows = (dict(zip(self._parts, row, strict=True)) for row in zip(*columns, strict=True))
        return list(await asyncio.gather(*map(self._combined, rows)))

    async def _routed(self, payloads: Sequence[Payload]) -> list[Verdict]:
        found: dict[int, Verdict] = {}
        for source, indices in _by_source(payloads):
            judger = self._routes.get(source) or self._routes.get(OTHERWISE)
            if judger is None:
                known = did_you_mean(source, list(self._routes))
                failure = JudgeFailed(
                    f"judger {self.config.label()!r} has no route for data_source {source!r}. {known}"
                )
                found.update(dict.fromkeys(indices, failure))
                continue
            found.update(zip(indices, await _ask(judger, [payloads[index] for index in indices]), strict=True))
        return [found[index] for index in range(len(payloads))]

    async def _combined(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        rewards: dict[str, Reward] = {}
        for label, verdict in verdicts.items():
            if isinstance(verdict, JudgeFailed):
                return verdict
            rewards[label] = verdict
        try:
            return added(rewards, self.config.label()) if self._merge is None else await self._merged(rewards)
        except JudgeFailed as error:
            return error

    async def _merged(self, rewards: Mapping[str, Reward]) -> Reward:
        values = {label: reward.value for label, reward in rewards.items()}
        name, merge = self.config.label(), self._merge
        if merge is None:
            raise JudgeFailed(f"judger {name!r} has no merge function")
        value = await self._guard.run(partial(merge, dict(values)))
        merged = as_reward(value, name)
        # A bare number keeps the parts that it was made of.
        return Reward(merged.value, values) if list(merged.parts) == [name] else merged

    async def close(self) -> None:
        if self._merge is not None:
            self._merge.close()
        await asyncio.gather(*(part.close() for part in [*self._parts.values(), *self._routes.values()]))


async def _ask(judger: Guarded, payloads: Sequence[Payload]) -> list[Verdict]:
    return await judge_all(judger, [payload.only(judger.needs) for payload in payloads])


def _by_source(payloads: Sequence[Payload]) -> Iterator[tuple[str, list[int]]]:
    sources: dict[str, list[int]] = {}
    for index, payload in enumerate(payloads):
        sources.setdefault(payload.data_source, []).append(index)
    yield from sources.items()
