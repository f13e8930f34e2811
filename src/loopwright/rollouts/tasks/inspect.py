"""Tasks of `inspect_ai`: its dataset, solver and scorers, sampled through our gateway.

The solver runs in our process with a model that is a session, so every token is captured. Each scorer becomes a part
of the reward. Inspect's own runner evaluates whole tasks, one at a time in a process; what surrounds a sample there is
set up here.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.core.errors import LoopwrightError, MissingExtra
from loopwright.core.imports import look_first_in
from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.remote.agent import RolloutFailed
from loopwright.rollouts.tasks.environment import EnvironmentTasks, brings, environment_score
from loopwright.rollouts.tasks.sources import TasksError

_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Inspect's letters: correct, partially correct, incorrect, no answer."""
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class InspectTasks(EnvironmentTasks):
    """A task of Inspect, with its own solver and scorers."""

    brings: ClassVar[Mapping[str, Mapping[str, Any]]] = brings(f"{__name__}:attempt")
    type: Literal["inspect"] = "inspect"
    task: str
    """`file.py@task`, the file relative to the scenario; or the registered name of an installed task."""

    def label(self) -> str:
        return self.name or self.task.rpartition("@")[2].rpartition("/")[2].removesuffix(".py")

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        look_first_in(scenario_dir)
        file, at, name = self.task.partition("@")
        if file.endswith(".py"):
            if not (scenario_dir / file).is_file():
                raise TasksError(f"{file} not found in {scenario_dir}")
            if not name:
                raise TasksError(f"{file} may have several tasks; write it as {file}@task")
            file = str((scenario_dir / file).absolute())
        spec = f"{file}{at}{name}"
        task = load(spec, json.dumps(self.args, sort_keys=True))
        for index, sample in enumerate(task.dataset[: self.limit]):
            yield {
                "messages": _messages(sample),
                "label": sample.target,
                "environment": {"task": spec, "args": self.args, "index": index},
                "sample": str(sample.id),
            }


@functools.cache
def load(spec: str, args: str) -> Any:
    """The task with these arguments, as JSON; TasksError if it cannot be run here."""
    try:
        loader = import_module("inspect_ai._eval.loader")
    except ModuleNotFoundError as error:
        raise MissingExtra("a task of Inspect", "inspect") from error
    tasks = loader.load_tasks([spec], json.loads(args))
    if len(tasks) != 1:
        names = ", ".join(task.name for task in tasks)
        raise TasksError(f"{spec} has {len(tasks)} tasks ({names or 'none'}) instead of one")
    (task,) = tasks
    if task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset):
        raise TasksError(f"task {task.name!r} needs a sandbox of Inspect, which rollouts do not start")
    if not task.scorer:
        raise TasksError(f"task {task.name!r} has no scorer, so nothing would be learned from it")
    return task


async def attempt(task: Task, base_url: str, api_key: str) -> Any:
    """One sample of a task, and its scores. RolloutFailed says who is at fault if there are none."""
    place = task.extra["environment"]
    try:
        inspect_task = load(place["task"], json.dumps(place["args"], sort_keys=True))
    except LoopwrightError as error:
        raise RolloutFailed(str(error), Fault.WORKLOAD) from error
    sample = deepcopy(inspect_task.dataset[place["index"]])
    if Task.of({"prompt": _messages(sample)}, id=task.id).messages != task.messages:
        reason = f"sample {place['index']} of {inspect_task.name!r} differs from when the run started"
        raise RolloutFailed(f"{reason}; make its order fixed", Fault.WORKLOAD)
    models = import_module("inspect_ai.model")
    # Without retries, which Inspect repeats for hours: the gateway does not change its mind.
    config = inspect_task.config.merge(models.GenerateConfig(max_retries=0))
    name = "openai-api/loopwright/policy"
    model = models.get_model(name, base_url=base_url, api_key=api_key, memoize=False, config=config)
    async with model:
        state, failure = await _solve(inspect_task, sample, model)
        score = await _score(inspect_task, state, sample)
    if failure is not None:
        raise RolloutFailed(describe_error(failure), Fault.POLICY, score)
    return score


async def _solve(task: Any, sample: Any, model: Any) -> tuple[Any, Exception | None]:
    """The state after the solver, and what ended it early if that was the policy."""
    context, run = import_module("inspect_ai._eval.context"), import_module("inspect_ai._eval.task.run")
    solvers, util = import_module("inspect_ai.solver"), import_module("inspect_ai.util")
    # Variables of this rollout's context, as for a sample of Inspect's own runner.
    context.init_task_context(model, config=model.config, approval=task.approval)
    state = solvers.TaskState(
        model=run.ModelName(model),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        target=run.Target(sample.target),
        choices=sample.choices,
        messages=run.sample_messages(sample),
        message_limit=task.message_limit,
        token_limit=task.token_limit,
        metadata=sample.metadata or {},
    )
    run.init_sample_model_data()
    run.set_sample_state(state)
    run.init_transcript(run.Transcript())
    run.init_subtask_store(state.store)
    run.init_scoring_context(task.scorer, run.Target(sample.target))
    run.init_sample_assistant_internal()

    async def generate(state: Any, tool_calls: Any = "loop", **options: Any) -> Any:
        config = model.config.merge(options)
        return await run.task_generate(model=model, state=state, tool_calls=tool_calls, cache=False, config=config)

    try:
        return await run.resolve_plan(task, None)(state, generate), None
    except util.LimitExceededError as error:
        return run.sample_state() or state, error
    except Exception as error:
        if refusal := _refusal(error):
            return run.sample_state() or state, refusal
        raise RolloutFailed(f"task {task.name!r} raised {describe_error(error)}", Fault.WORKLOAD) from error


def _refusal(error: BaseException) -> Exception | None:
    """What the gateway refused, such as one turn too many, which is the policy's fault; RolloutFailed if it is away."""
    openai = import_module("openai")
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in causes:
        if isinstance(cause, openai.APIConnectionError | openai.InternalServerError):
            raise RolloutFailed(describe_error(cause), Fault.INFRA) from error
    return next((cause for cause in causes if isinstance(cause, openai.APIStatusError)), None)


async def _score(task: Any, state: Any, sample: Any) -> Any:
    scoring = import_module("inspect_ai.scorer")
    run = import_module("inspect_ai._eval.task.run")
    state.completed = True
    run.set_sample_state(state)
    parts: dict[str, float] = {}
    metrics: dict[str, Any] = {}
    for scorer in task.scorer:
        name = run.unique_scorer_name(scorer, list(metrics))
        try:
            score = await scorer(state, scoring.Target(sample.target))
            values = {} if score is None else _parts(name, score.value)
        except Exception as error:  # noqa: BLE001  a user's scorer may raise anything
            return {"error": f"scorer {name!r} raised {describe_error(error)}"}
        parts |= values
        if score is not None:
            metrics[name] = {"answer": score.answer, "explanation": score.explanation, "metadata": score.metadata}
    return environment_score(parts, metrics) if parts else {"error": "no scorer gave a score"}


def _parts(name: str, value: Any) -> dict[str, float]:
    """The numbers of a score: one, or several with names."""
    if isinstance(value, Mapping):
        return {f"{name}.{key}": _number(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return {f"{name}.{index}": _number(each) for index, each in enumerate(value)}
    return {name: _number(value)}


def _number(value: Any) -> float:
    """A value as Inspect's own metrics read it; ValueError if it is not a number."""
    if isinstance(value, str):
        value = _VALUES.get(value, _WORDS.get(value.lower(), value))
    return float(value)


def _messages(sample: Any) -> list[dict[str, Any]]:
    """The input of a sample as plain messages."""
    if isinstance(sample.input, str):
        return [{"role": "user", "content": sample.input}]
    return [{"role": message.role, "content": message.text} for message in sample.input]
