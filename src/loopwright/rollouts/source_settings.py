"""What can differ between the sources of a run: loop, judger, production and sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from loopwright.core.errors import Problem
from loopwright.engines.base import Sampling
from loopwright.rollouts.judgers.base import JudgerConfig
from loopwright.rollouts.loops.base import LoopConfig
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.tasks.sources import TasksConfig, select_tasks

_SHOWN = 3
"""How many tasks that cannot be attempted an error names: the first may be a rare case."""


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How the tasks of one source are attempted, judged and produced: by its own settings, or else the run's."""

    source: TasksConfig
    key: str
    """Where the source stands, such as `tasks, math`."""
    loop: LoopConfig
    judger: JudgerConfig
    produce: ProduceConfig
    sampling: Sampling | None
    """What differs from the loop's sampling; None if nothing does."""
    judger_key: str
    """Where the judger stands, such as `[run.eval] judger`."""

    @property
    def loop_key(self) -> str:
        """Where the loop stands."""
        return "loop" if self.source.loop is None else f"{self.key}, loop"

    def as_json(self) -> dict[str, Any]:
        """What is its own, as plain data; empty if all is the run's."""
        keys = {"loop", "judger", "produce", "sampling"}
        return self.source.model_dump(mode="json", include=keys, exclude_unset=True, exclude_none=True)

    def own_problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with the loop and the judger that are its own."""
        problems = []
        if self.source.loop is not None:
            problems += [Problem(f"{self.loop_key}.{p.key}", p.message) for p in self.loop.problems(scenario_dir)]
        if self.source.judger is not None:
            problems += [Problem(f"{self.judger_key}.{p.key}", p.message) for p in self.judger.problems(scenario_dir)]
        return problems

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with its tasks under this loop and this judger."""
        return (
            self._refusal_problems(scenario_dir)
            or self._routing_problems(scenario_dir)
            or self._evidence_problems(scenario_dir)
        )

    def _refusal_problems(self, scenario_dir: Path) -> list[Problem]:
        """No task can be attempted."""
        tasks, skipped = select_tasks(self.source, scenario_dir, self.loop.refusal)
        if tasks:
            return []
        reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(skipped.items(), _SHOWN))
        more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        return [Problem(self.key, f"no task can be attempted: {reasons}{more}.")]

    def _routing_problems(self, scenario_dir: Path) -> list[Problem]:
        """The data sources that the judger has no route for. Tasks are only loaded if there can be any."""
        if not self.judger.routing_problems([""]):
            return []
        data_sources = {task.data_source: None for task in self.source.load(scenario_dir)}
        return [Problem(f"{self.judger_key}.{p.key}", p.message) for p in self.judger.routing_problems(data_sources)]

    def _evidence_problems(self, scenario_dir: Path) -> list[Problem]:
        """A loop that does not record the evidence that the judger requires, or tasks without it."""
        required = self.judger.required_evidence()
        if missing := required - set(self.loop.evidence):
            needs = f"needs {', '.join(sorted(missing))}, which loop type {self.loop.type!r} does not record"
            return [Problem(self.judger_key, f'{needs}; use loop = {{ type = "remote", ... }}.')]
        tasks = select_tasks(self.source, scenario_dir, self.loop.refusal)[0] if required else []
        problems = ((t.id, self.judger.task_problem(t) or self.loop.task_problem(t, scenario_dir)) for t in tasks)
        messages = [f"task {name} cannot be judged: {problem}" for name, problem in problems if problem]
        more = f"; and {len(messages) - 1} more" if len(messages) > 1 else ""
        return [Problem(self.judger_key, f"{messages[0]}{more}.")] if messages else []


def describe_own(own: Mapping[str, Any]) -> str:
    """The own settings of a source in a few words, such as `; judger length; sampling max_tokens 9`; maybe empty."""
    words = []
    for name, settings in own.items():
        keys = [settings["type"]] if name in ("loop", "judger") else [f"{k} {v}" for k, v in settings.items()]
        words.append(f"; {name} {', '.join(keys)}")
    return "".join(words)
