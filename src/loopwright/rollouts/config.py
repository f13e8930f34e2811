"""The `[run.rollout]` table: tasks, a loop that attempts them, a judger, and how groups are produced."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.core.registry import config_parser
from loopwright.rollouts.judgers.base import AnyJudger
from loopwright.rollouts.loops.base import LoopConfig, loops
from loopwright.rollouts.pools.resources import PlacementConfig, ResourceRequest
from loopwright.rollouts.remote.gateway_config import GatewayHostConfig, RayGatewayConfig
from loopwright.rollouts.tasks.sources import Sources, TasksConfig, select_tasks, source_problems

_AnyLoop = Annotated[SerializeAsAny[LoopConfig], BeforeValidator(config_parser(loops))]


class ProduceConfig(Config):
    """How groups of rollouts are produced."""

    type: Literal["sync", "async"] = "sync"
    """`sync`: one batch at a time; `async`: continuously, with more groups in flight than a batch needs."""
    over_sample: float = Field(default=0.25, ge=0)
    """Asynchronous only: how many more groups than a batch has are in flight, as a share of the batch."""
    max_staleness: int = Field(default=1, ge=0)
    """How many versions old a group may be when it is trained on; older prompts are attempted again."""
    staleness: Literal["group", "token"] = "group"
    """`group`: a group with one token that is too old expires; `token`: only if all its tokens are too old."""
    partial: bool = True
    """Whether a rollout continues after a weight update, in the middle of a turn; otherwise it starts again."""
    filter: Literal["none", "equal_rewards"] = "none"
    """`equal_rewards` leaves out groups whose rewards are all equal, since nothing can be learned from them."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running rollouts get to finish before they are cancelled, when production is drained."""


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
    loop: _AnyLoop = Field(examples=['{ type = "single_turn" }'])
    """How one task becomes one episode, chosen by `type`."""
    judger: AnyJudger = Field(examples=['{ type = "python", function = "my_judge:exact" }'])
    """How an episode becomes a reward, chosen by `type`."""
    produce: ProduceConfig = ProduceConfig()
    """How groups of rollouts are produced."""
    engines: PlacementConfig = PlacementConfig()
    """With `workers`: that many engines in Ray actors of their own, shared by all loop workers. Otherwise each loop
    worker has its own engine."""

    def engine_placement(self, gateway: GatewayHostConfig | None) -> PlacementConfig:
        """Where engines that are shared run; no `workers` if none are. Gateways on Ray have at least one."""
        if isinstance(gateway, RayGatewayConfig) and not self.engines.workers:
            return self.engines.model_copy(update={"workers": 1})
        return self.engines

    def resource_requests(self, gateway: GatewayHostConfig | None = None) -> list[ResourceRequest]:
        """The resources that its pools need on a Ray cluster; empty if they are in this process."""
        parts: dict[str, PlacementConfig] = {
            "loop": self.loop,
            "judger": self.judger,
            "engines": self.engine_placement(gateway),
        }
        if isinstance(gateway, RayGatewayConfig):
            parts["gateway"] = gateway
        return [part.request(name) for name, part in parts.items() if part.workers]

    def problems(self, scenario_dir: Path, held_out: Sequence[TasksConfig] = ()) -> list[Problem]:
        """What is wrong with it, for its own tasks and the held-out ones; checked before anything starts."""
        sources = (*self.tasks, *held_out)
        problems = source_problems(self.tasks, scenario_dir)
        problems += [Problem(f"loop.{p.key}", p.message) for p in self.loop.problems(scenario_dir)]
        problems += [Problem(f"judger.{p.key}", p.message) for p in self.judger.problems(scenario_dir)]
        problems += self._exposed_sources(sources, scenario_dir)
        return (
            problems
            or self._refusal_problems(sources, scenario_dir)
            or self._routing_problems(sources, scenario_dir)
            or self._evidence_problems(sources, scenario_dir)
        )

    def _refusal_problems(self, sources: Sequence[TasksConfig], scenario_dir: Path) -> list[Problem]:
        """Sources of which no task can be attempted."""
        problems = []
        for source in sources:
            tasks, skipped = select_tasks(source, scenario_dir, self.loop.refusal)
            if not tasks:
                first, count = next(iter(skipped.items())), len(skipped)
                more = f"; and {count - 1} more" if count > 1 else ""
                problems.append(
                    Problem(f"tasks, {source.label()}", f"no task can be attempted: {first[0]}: {first[1]}{more}.")
                )
        return problems

    def _exposed_sources(self, sources: Sequence[TasksConfig], scenario_dir: Path) -> list[Problem]:
        """Sources that an agent could read: labels, tests and solutions."""
        paths = [(source.label(), getattr(source, "path", None)) for source in sources]
        exposed = [name for name, path in paths if path and self.loop.exposes(scenario_dir / path, scenario_dir)]
        return [
            Problem(
                "loop.readable",
                f"agents could read the tasks of {name!r}, with labels and tests. Name only the agent's own directory.",
            )
            for name in exposed
        ]

    def _routing_problems(self, sources: Sequence[TasksConfig], scenario_dir: Path) -> list[Problem]:
        """The data sources that the judger has no route for. Tasks are only loaded if there can be any."""
        if not self.judger.routing_problems([""]):
            return []
        data_sources = {task.data_source: None for source in sources for task in source.load(scenario_dir)}
        return [Problem(f"judger.{p.key}", p.message) for p in self.judger.routing_problems(data_sources)]

    def _evidence_problems(self, sources: Sequence[TasksConfig], scenario_dir: Path) -> list[Problem]:
        """A loop that does not record the evidence that the judger requires, or tasks without it."""
        required = self.judger.required_evidence()
        if missing := required - set(self.loop.evidence):
            needs = f"needs {', '.join(sorted(missing))}, which loop type {self.loop.type!r} does not record"
            return [Problem("judger", f'{needs}; use loop = {{ type = "remote", ... }}.')]
        refusal = self.loop.refusal
        usable = (task for source in sources for task in select_tasks(source, scenario_dir, refusal)[0])
        tasks = list(usable) if required else []
        problems = ((t.id, self.judger.task_problem(t) or self.loop.task_problem(t, scenario_dir)) for t in tasks)
        messages = [f"task {name} cannot be judged: {problem}" for name, problem in problems if problem]
        more = f"; and {len(messages) - 1} more" if len(messages) > 1 else ""
        return [Problem("judger", f"{messages[0]}{more}.")] if messages else []
