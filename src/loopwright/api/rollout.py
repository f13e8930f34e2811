"""`rollout`: judged episodes from Python objects, without a scenario file."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loopwright.api import objects
from loopwright.api.objects import register
from loopwright.api.tune import run
from loopwright.core.episode import Episode
from loopwright.core.errors import Problem, ScenarioError
from loopwright.core.task import Task
from loopwright.engines.base import Engine, EngineConfig, Sampling
from loopwright.engines.shortcuts import engine_config
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.rollouts.judgers.base import BaseJudger
from loopwright.rollouts.loops.base import AgentLoop


def rollout(
    tasks: Iterable[Task | Mapping[str, Any] | str],
    loop: "str | type[AgentLoop] | AgentLoop | Mapping[str, Any]" = "single_turn",
    judger: "Callable[..., Any] | str | type[BaseJudger] | BaseJudger | Mapping[str, Any] | None" = None,
    *,
    engine: str | type[Engine] | Engine | EngineConfig | Mapping[str, Any],
    samples: int = 1,
    sampling: Sampling | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    seed: int = 0,
) -> list[Episode]:
    """Attempt each task `samples` times and return the judged episodes, in the order of the tasks.

        episodes = rollout(["What is 1 + 1?"], "single_turn", lambda answer: float("2" in answer), engine="smollm2")

    A task is a prompt, a row such as `{"prompt": "…", "label": "2"}`, or a Task. The loop is a name, an AgentLoop class
    or object, or a table as in a scenario. The judger is a function of facts such as `answer` and `label`, a name, a
    Judger class or object, or a table; without one, every reward is the number of sampled tokens. The engine is a name
    such as "tiny" or "smollm2", an Engine class or object (closed at the end), or a table.

    Episodes are recorded in `output`, by default a new directory under `out/`, like those of any run.
    """
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | Mapping):
        raise TypeError(f"tasks must be a list of tasks, not {tasks!r}")
    if not (tasks := list(tasks)):
        raise ValueError("rollout needs at least one task")
    rows = [_row(task, str(index)) for index, task in enumerate(tasks)]
    loop_table = _table("loop", loop)
    if sampling is not None:
        table = sampling.model_dump(exclude_unset=True) if isinstance(sampling, Sampling) else dict(sampling)
        loop_table = loop_table | {"sampling": table}
    scenario = {
        "name": "rollout",
        "run": [
            {
                "name": "rollout",
                "agent": {"type": "collect", "trials": len(rows) * samples, "group_size": samples, "seed": seed},
                "rollout": {
                    "tasks": {"type": "python", "function": register("tasks", lambda: rows)},
                    "loop": loop_table,
                    "judger": {"type": "length"} if judger is None else _judger_table(judger),
                },
                "engine": _table("engine", engine_config(engine) if isinstance(engine, str) else engine),
            }
        ],
    }
    try:
        study = run(scenario, output)
    except ScenarioError as error:
        problems = []
        for problem in error.problems:  # name the argument that a key of the scenario comes from
            key = problem.key.replace("[run.engine] ", "engine.").replace("[run.engine]", "engine").rpartition("] ")[2]
            key = "samples" if key in ("trials", "group_size") else key.removesuffix(".type")
            problems.append(Problem(key, problem.message.replace(f"{objects.__name__}:", "")))
        raise ScenarioError("rollout", problems) from None
    order = {row["id"]: index for index, row in enumerate(rows)}
    with Ledger.read(study.output / study.run / "ledger.db") as ledger:
        episodes = [rollout.episode for rollout in rollouts(ledger)]
    return sorted(episodes, key=lambda episode: order[episode.task.id])


def _row(task: Task | Mapping[str, Any] | str, id: str) -> dict[str, Any]:
    if isinstance(task, str):
        task = {"prompt": task}
    if not isinstance(task, Task | Mapping):
        raise TypeError(f'a task is a prompt, a row such as {{"prompt": "…"}}, or a Task, not {task!r}')
    row = {**task.extra, **task.as_json()} if isinstance(task, Task) else dict(task)
    row.pop("extra", None)
    return {"id": id, **row}


def _table(name: str, item: Any) -> dict[str, Any]:
    """The table that names a registered type, a class or an object of the caller's."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, str):
        return {"type": item}
    if isinstance(item, EngineConfig):
        return {"type": item.type, **item.model_dump(mode="json", exclude_unset=True)}
    if isinstance(item, type):
        return {"type": register(name, item)}
    if not hasattr(item, "config"):
        raise TypeError(
            f"the {name} must be a name, a class, an object of one, or a table as in a scenario, not {item!r}"
        )
    config = item.config.model_dump(mode="json", exclude_unset=True)
    # Registries hold classes: this one is always the object itself.
    constant = type(type(item).__name__, (type(item),), {"__new__": lambda *_, **__: item})
    return {**config, "type": register(name, constant)}


def _judger_table(judger: Any) -> dict[str, Any]:
    if isinstance(judger, str | Mapping):
        return _table("judger", judger)
    if isinstance(judger, BaseJudger):
        return {"name": judger.config.label(), **_table("judger", judger)}
    name = re.sub(r"\W+", "_", getattr(judger, "__name__", "")).strip("_") or "judger"
    if isinstance(judger, type) and issubclass(judger, BaseJudger):
        return {"name": name, **_table("judger", judger)}
    return {"type": "python", "function": register(name, judger), "name": name}
