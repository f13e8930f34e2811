"""The task mix: in which order prompts are drawn. Sources share each batch by weight, each in seeded epochs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from math import lcm
from pathlib import Path
from random import Random
from typing import Any

import orjson

from loopwright.core.task import Task
from loopwright.rollouts.tasks.sources import TasksConfig, select_tasks


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task and its place in its source: what a rollout's action refers to."""

    source: str
    index: int
    task: Task

    @property
    def action(self) -> Mapping[str, Any]:
        """What the ledger records."""
        return {"source": self.source, "index": self.index, "task": self.task.id}


def held_out_name(source: TasksConfig) -> str:
    """The name of a source whose tasks are only for evaluation."""
    return f"eval:{source.label()}"


class TaskMix:
    """Draws prompts from several sources so that each has had its share at any moment, to within one prompt.

    Which prompt comes next depends only on the seed and on how many were drawn from each source.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        held_out: Mapping[str, Sequence[Task]] | None = None,
    ) -> None:
        fractions = {name: Fraction(str((weights or {}).get(name, 1.0))) for name in sources}
        denominator = lcm(*(weight.denominator for weight in fractions.values()))
        self._sources, self._seed, self._held_out = sources, seed, held_out or {}
        self.weights = {name: int(weight * denominator) for name, weight in fractions.items()}
        """The share of each source, as whole numbers."""
        self._draws = dict.fromkeys(sources, 0)
        self.skipped: Mapping[str, str] = {}
        """The tasks that the sources have but nobody can attempt here, and why."""
        self._orders: dict[str, tuple[int, list[int]]] = {}

    @classmethod
    def load(
        cls,
        configs: Sequence[TasksConfig],
        seed: int,
        scenario_dir: Path,
        held_out: Sequence[TasksConfig] = (),
        refusal: Callable[[str, Task], str] = lambda *_: "",
    ) -> "TaskMix":
        """The mix of these sources, without the tasks for which there is a refusal, given their source's name.

        The held-out ones are for evaluation and never drawn.
        """
        named = {config.label(): config for config in configs}
        named |= {held_out_name(config): config for config in held_out}
        selections = {
            name: select_tasks(config, scenario_dir, partial(refusal, name)) for name, config in named.items()
        }
        sources = {name: tasks for name, (tasks, _) in selections.items()}
        mix = cls(
            {config.label(): sources[config.label()] for config in configs},
            {config.label(): config.weight for config in configs},
            seed,
            {name: sources[name] for name in map(held_out_name, held_out)},
        )
        mix.skipped = {f"{name}: {id}": why for name, (_, bad) in selections.items() for id, why in bad.items()}
        return mix

    def restore(self, draws: Mapping[str, int]) -> None:
        """Continue after this many draws from each source."""
        self._draws.update({name: count for name, count in draws.items() if name in self._draws})

    def draw(self, among: Collection[str] | None = None) -> Prompt:
        """The next prompt, of all sources or among these."""
        weights = self.weights if among is None else {name: self.weights[name] for name in among}
        name = next_share(weights, self._draws)
        tasks = self._sources[name]
        epoch, position = divmod(self._draws[name], len(tasks))
        self._draws[name] += 1
        order_epoch, order = self._orders.get(name, (-1, []))
        if order_epoch != epoch:
            order = list(range(len(tasks)))
            Random(f"{self._seed}:{name}:{epoch}").shuffle(order)
            self._orders[name] = epoch, order
        return Prompt(name, order[position], tasks[order[position]])

    def find(self, action: Mapping[str, Any]) -> Prompt:
        """The prompt that a recorded action refers to."""
        name, index = action["source"], action["index"]
        tasks = self._held_out[name] if name in self._held_out else self._sources[name]
        if not 0 <= index < len(tasks):
            raise IndexError(f"{name} has {len(tasks)} tasks; task {index} does not exist")
        return Prompt(name, index, tasks[index])

    def prompts(self) -> list[Prompt]:
        """All prompts that can be drawn."""
        return _prompts(self._sources)

    def held_out(self) -> list[Prompt]:
        """The prompts that are only for evaluation."""
        return _prompts(self._held_out)

    def fingerprint(self, among: Collection[str] | None = None) -> str:
        """Changes with any task, of all sources or of these."""
        digest = blake2b(digest_size=16)
        for name, tasks in [*self._sources.items(), *self._held_out.items()]:
            if among is not None and name not in among:
                continue
            digest.update(orjson.dumps((name, len(tasks))))
            for task in tasks:
                digest.update(orjson.dumps(task.as_json()))
        return digest.hexdigest()


def next_share(weights: Mapping[str, int], counts: Mapping[str, int]) -> str:
    """Whose turn it is, so that each has had its share of all turns at any moment, to within one."""
    # Earliest deadline first: of those whose share allows another turn now, the one that is due soonest.
    # It keeps all within one of their shares; taking the one that is furthest behind does not.
    now, total = sum(counts[name] for name in weights), sum(weights.values())
    allowed = [name for name, weight in weights.items() if counts[name] * total // weight <= now]
    return min(allowed, key=lambda name: -(-(counts[name] + 1) * total // weights[name]))


def _prompts(sources: Mapping[str, Sequence[Task]]) -> list[Prompt]:
    return [Prompt(name, index, task) for name, tasks in sources.items() for index, task in enumerate(tasks)]
