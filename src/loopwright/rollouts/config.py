"""What `[run.rollout]` holds: tasks, a loop that attempts them, a judger, and how production goes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator

from loopwright.core.chosen import chosen
from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.rollouts.judger import JudgerConfig
from loopwright.rollouts.judging.parse import AnyJudger
from loopwright.rollouts.loop import LoopConfig, loops
from loopwright.rollouts.produce import ProduceConfig
from loopwright.rollouts.resources import Ask
from loopwright.rollouts.tasks import TasksConfig, task_sources

_source = chosen(task_sources)
_AnyTasks = Annotated[SerializeAsAny[TasksConfig], BeforeValidator(_source)]
_AnyLoop = Annotated[SerializeAsAny[LoopConfig], BeforeValidator(chosen(loops))]


class RolloutConfig(Config):
    """How tasks become judged episodes."""

    tasks: tuple[_AnyTasks, ...] = Field(examples=['{ type = "jsonl", path = "tasks.jsonl" }'])
    """Where tasks come from, one source or a list, each chosen by `type`."""
    loop: _AnyLoop = Field(examples=['{ type = "single_turn" }'])
    """How one task becomes one episode, chosen by `type`."""
    judger: AnyJudger = Field(examples=['{ type = "python", handler = "my_judge:exact" }'])
    """How an episode becomes a reward, chosen by `type`."""
    produce: ProduceConfig = ProduceConfig()
    """How groups of rollouts are produced."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return (_source(value),)
        if not value:
            raise ValueError("is empty; name at least one source of tasks")
        return value

    def asks(self) -> list[Ask]:
        """What its pools ask of a Ray cluster; nothing if they are in this process."""
        parts: dict[str, LoopConfig | JudgerConfig] = {"loop": self.loop, "judger": self.judger}
        return [Ask(name, part.workers, part.cpus, part.memory) for name, part in parts.items() if part.workers]

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        found = [Problem(f"tasks, {p.key}", p.message) for source in self.tasks for p in source.problems(home)]
        names = Counter(source.label() for source in self.tasks)
        twice = [name for name, count in names.items() if count > 1]
        found += [Problem("tasks", f"two sources are called {name!r}; give each its own `name`.") for name in twice]
        found += [Problem(f"loop.{p.key}", p.message) for p in self.loop.problems(home)]
        found += [Problem(f"judger.{p.key}", p.message) for p in self.judger.problems(home)]
        found += self.shown(self.tasks, home)
        return found or self._unjudged(home) or self._untested(home)

    def shown(self, sources: Sequence[TasksConfig], home: Path) -> list[Problem]:
        """Sources that an agent could read for itself: labels, tests and solutions."""
        files = [(source.label(), getattr(source, "path", None)) for source in sources]
        shown = [name for name, path in files if path is not None and self.loop.shows(home / path, home)]
        said = "would be shown to agents, with what they are judged by. Name the agent's own directory only."
        return [Problem("loop.readable", f"the tasks of {name!r} {said}") for name in shown]

    def _untested(self, home: Path) -> list[Problem]:
        """Where the judger goes by what the loop brings home: a loop that does not, and tasks that it cannot judge."""
        wanted = self.judger.evidence()
        if missing := wanted - set(self.loop.evidence):
            said = f"goes by {', '.join(sorted(missing))}, which loop type {self.loop.type!r} does not bring home"
            return [Problem("judger", f'{said}; use loop = {{ type = "remote", ... }}.')]
        tasks = [task for source in self.tasks for task in source.load(home)] if wanted else []
        lacks = ((task.id, self.judger.lacks(task) or self.loop.lacks(task, home)) for task in tasks)
        lacking = [f"task {name} cannot be judged: {lack}" for name, lack in lacks if lack]
        more = f"; and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return [Problem("judger", f"{lacking[0]}{more}.")] if lacking else []

    def _unjudged(self, home: Path) -> list[Problem]:
        """The tasks that the judger has no rule for; they are read again only if there can be any."""
        if not self.judger.unjudged([""]):
            return []
        data_sources = {task.data_source: None for source in self.tasks for task in source.load(home)}
        return [Problem(f"judger.{p.key}", p.message) for p in self.judger.unjudged(data_sources)]
