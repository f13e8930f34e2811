"""What `[run.rollout]` holds: tasks, a loop that attempts them, a judger, and how production goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny

from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.core.tagged_config import config_parser
from loopwright.rollouts.judgers.base import AnyJudger, JudgerConfig
from loopwright.rollouts.loops.base import LoopConfig, loops
from loopwright.rollouts.pools.resources import ResourceRequest
from loopwright.rollouts.produce import ProduceConfig
from loopwright.rollouts.tasks.sources import Sources, TasksConfig, source_problems

_AnyLoop = Annotated[SerializeAsAny[LoopConfig], BeforeValidator(config_parser(loops))]


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

    def resource_requests(self) -> list[ResourceRequest]:
        """What its pools ask of a Ray cluster; nothing if they are in this process."""
        parts: dict[str, LoopConfig | JudgerConfig] = {"loop": self.loop, "judger": self.judger}
        return [
            ResourceRequest(name, part.workers, part.cpus, part.memory) for name, part in parts.items() if part.workers
        ]

    def problems(self, home: Path, held_out: Sequence[TasksConfig] = ()) -> list[Problem]:
        """What is wrong with it, for its own tasks and those that are held out; found before anything starts."""
        every = (*self.tasks, *held_out)
        found = source_problems(self.tasks, home)
        found += [Problem(f"loop.{p.key}", p.message) for p in self.loop.problems(home)]
        found += [Problem(f"judger.{p.key}", p.message) for p in self.judger.problems(home)]
        found += self._shown(every, home)
        return found or self._unjudged(every, home) or self._untested(every, home)

    def _shown(self, sources: Sequence[TasksConfig], home: Path) -> list[Problem]:
        """Sources that an agent could read for itself: labels, tests and solutions."""
        files = [(source.label(), getattr(source, "path", None)) for source in sources]
        shown = [name for name, path in files if path is not None and self.loop.exposes(home / path, home)]
        said = "would be shown to agents, with what they are judged by. Name the agent's own directory only."
        return [Problem("loop.readable", f"the tasks of {name!r} {said}") for name in shown]

    def _untested(self, sources: Sequence[TasksConfig], home: Path) -> list[Problem]:
        """Where the judger goes by what the loop brings home: a loop that does not, and tasks that it cannot judge."""
        wanted = self.judger.required_evidence()
        if missing := wanted - set(self.loop.evidence):
            said = f"goes by {', '.join(sorted(missing))}, which loop type {self.loop.type!r} does not bring home"
            return [Problem("judger", f'{said}; use loop = {{ type = "remote", ... }}.')]
        tasks = [task for source in sources for task in source.load(home)] if wanted else []
        lacks = ((task.id, self.judger.task_problem(task) or self.loop.task_problem(task, home)) for task in tasks)
        lacking = [f"task {name} cannot be judged: {lack}" for name, lack in lacks if lack]
        more = f"; and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return [Problem("judger", f"{lacking[0]}{more}.")] if lacking else []

    def _unjudged(self, sources: Sequence[TasksConfig], home: Path) -> list[Problem]:
        """The tasks that the judger has no rule for; they are read again only if there can be any."""
        if not self.judger.routing_problems([""]):
            return []
        data_sources = {task.data_source: None for source in sources for task in source.load(home)}
        return [Problem(f"judger.{p.key}", p.message) for p in self.judger.routing_problems(data_sources)]
