"""The `[run.rollout]` table: tasks, a loop that attempts them, a judger, and how groups are produced."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config, overridden
from loopwright.core.errors import Problem
from loopwright.engines.base import Sampling
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers.base import AnyJudger, JudgerConfig
from loopwright.rollouts.loops.base import AnyLoop, LoopConfig
from loopwright.rollouts.pools.resources import PlacementConfig, ResourceRequest
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.remote.gateway_config import GatewayHostConfig, RayGatewayConfig
from loopwright.rollouts.source_settings import SourceSettings
from loopwright.rollouts.tasks.mix import held_out_name
from loopwright.rollouts.tasks.sources import Sources, TasksConfig, source_problems

_INHERITED = ("sampling", "concurrency")
"""What the loop of a source has from the run's loop, in addition to its workers, unless it sets it itself."""
T = TypeVar("T")


class RolloutAgentConfig(AgentConfig):
    """The keys that every agent of a rollout run has."""

    compares_group: ClassVar[bool] = False
    """Whether a rollout is learned from by comparing it with its group, so that a small group distorts it."""
    group_size: int = Field(default=8, ge=1)
    """How many rollouts attempt the same prompt."""
    min_group: int | None = Field(default=None, ge=1)
    """How many judged rollouts a group must have to be used; others are replaced by another prompt. By default the
    group's size for `grpo` and `rloo`, and 1 for other agents."""

    @model_validator(mode="after")
    def _check_min_group(self) -> Self:
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"`min_group` ({self.min_group}) must be at most `group_size` ({self.group_size})")
        return self

    @property
    def min_size(self) -> int:
        """How many judged rollouts a group must have."""
        return self.min_group or (self.group_size if self.compares_group else 1)


class RolloutConfig(Config):
    """How tasks become judged episodes."""

    tasks: Sources = Field(examples=['{ type = "jsonl", path = "tasks.jsonl" }'])
    """Where tasks come from, one source or a list, each chosen by `type`."""
    loop: AnyLoop = Field(examples=['{ type = "single_turn" }'])
    """How one task becomes one episode, chosen by `type`."""
    judger: AnyJudger = Field(examples=['{ type = "python", function = "my_judge:exact" }'])
    """How an episode becomes a reward, chosen by `type`."""
    produce: ProduceConfig = ProduceConfig()
    """How groups of rollouts are produced."""
    engines: PlacementConfig = PlacementConfig()
    """With `workers`: that many engines in separate Ray actors, shared by all loop workers. Otherwise each loop
    worker has its own engine."""

    def engine_placement(self, gateway: GatewayHostConfig | None) -> PlacementConfig:
        """Where engines that are shared run; no `workers` if none are. Gateways on Ray have at least one."""
        if isinstance(gateway, RayGatewayConfig) and not self.engines.workers:
            return self.engines.model_copy(update={"workers": 1})
        return self.engines

    def settings(self, evaluation: EvalConfig | None = None) -> dict[str, SourceSettings]:
        """The settings of each source, by the name that its trials have; those of held-out sources come last."""
        settings = {source.label(): self._settings(source, "", self.judger, "judger") for source in self.tasks}
        if evaluation is not None:
            judger, key = self.judger, "judger"
            if evaluation.judger is not None:
                judger, key = evaluation.judger, "[run.eval] judger"
            for source in evaluation.tasks:
                table = "[run.eval] "
                settings[held_out_name(source)] = self._settings(source, table, judger, key, evaluation.sampling)
        return settings

    def _settings(
        self, source: TasksConfig, table: str, judger: JudgerConfig, judger_key: str, sampling: Sampling | None = None
    ) -> SourceSettings:
        key = f"{table}tasks, {source.label()}"
        if source.sampling is not None:
            sampling = source.sampling if sampling is None else overridden(sampling, source.sampling)
        loop = self.loop
        if source.loop is not None:  # with what it inherits from the run's
            names = {*_INHERITED, *PlacementConfig.model_fields} - source.loop.model_fields_set
            inherited = {name: getattr(self.loop, name) for name in names & self.loop.model_fields_set}
            loop = source.loop.model_copy(update=inherited)
        return SourceSettings(
            source,
            key,
            loop=loop,
            judger=source.judger or judger,
            produce=overridden(self.produce, source.produce),
            sampling=sampling,
            judger_key=f"{key}, judger" if source.judger is not None else judger_key,
        )

    def loop_pools(self, evaluation: EvalConfig | None = None) -> dict[str, dict[str, LoopConfig]]:
        """The distinct loops by name, in the pools that run them: the run's own is called "", others as their source.

        Loops with equal workers share them, and the engines in them. A pool is called as the first of its loops.
        """
        pools: dict[str, dict[str, LoopConfig]] = {}  # by what describes their workers
        for name, loop in distinct(self.loop, {n: s.loop for n, s in self.settings(evaluation).items()})[0].items():
            workers = name if loop.through_gateway else loop.model_dump_json(include={*PlacementConfig.model_fields})
            pools.setdefault(workers, {})[name] = loop
        return {next(iter(loops)): loops for loops in pools.values()}

    def resource_requests(
        self, gateway: GatewayHostConfig | None = None, evaluation: EvalConfig | None = None
    ) -> list[ResourceRequest]:
        """The resources that its pools need on a Ray cluster; empty if they are in this process."""
        pools = self.loop_pools(evaluation).items()
        parts: dict[str, PlacementConfig] = {
            part_name("loop", name): next(iter(loops.values())) for name, loops in pools
        }
        judgers = distinct(self.judger, {n: s.judger for n, s in self.settings(evaluation).items()})[0]
        for name, judger in judgers.items():
            parts |= judger.placements(part_name("judger", name))
        parts["engines"] = self.engine_placement(gateway)
        if isinstance(gateway, RayGatewayConfig):
            parts["gateway"] = gateway
        return [part.request(name) for name, part in parts.items() if part.workers]

    def problems(self, scenario_dir: Path, evaluation: EvalConfig | None = None) -> list[Problem]:
        """What is wrong with it, for its own tasks and the held-out ones; checked before anything starts."""
        settings = self.settings(evaluation)
        problems = source_problems(self.tasks, scenario_dir)
        problems += [Problem(f"loop.{p.key}", p.message) for p in self.loop.problems(scenario_dir)]
        problems += [Problem(f"judger.{p.key}", p.message) for p in self.judger.problems(scenario_dir)]
        for each in settings.values():
            problems += each.own_problems(scenario_dir)
        problems += self._exposed_sources(settings.values(), scenario_dir)
        # A missing route of the run's judger is one problem, however many sources need it.
        return problems or list(dict.fromkeys(p for each in settings.values() for p in each.problems(scenario_dir)))

    def _exposed_sources(self, settings: Iterable[SourceSettings], scenario_dir: Path) -> list[Problem]:
        """Sources that an agent could read, its own or another: labels, tests and solutions."""
        loops = {each.loop_key: each.loop for each in settings}
        paths = {each.source.label(): getattr(each.source, "path", None) for each in settings}
        return [
            Problem(
                f"{key}.readable",
                f"agents could read the tasks of {name!r}, with labels and tests. Name only the agent's own directory.",
            )
            for key, loop in loops.items()
            for name, path in paths.items()
            if path and loop.exposes(scenario_dir / path, scenario_dir)
        ]


def distinct(default: T, values: Mapping[str, T]) -> tuple[dict[str, T], dict[str, str]]:
    """Values by name without repetitions, and the name for each key: "" for the default, or else the first key."""
    by_name: dict[str, T] = {}
    names: dict[str, str] = {}
    for key, value in values.items():
        names[key] = "" if value == default else next((n for n, v in by_name.items() if v == value), key)
        by_name.setdefault(names[key], value)
    return by_name, names


def part_name(part: str, source: str) -> str:
    """What a loop or judger is called in messages: that of a source names it."""
    return f"{part} of {source}" if source else part
