"""Environments of the `verifiers` package: its dataset, rollout and rubric, sampled through our gateway.

The environment runs in our process with OpenAI's SDK pointed at a session, so every token is captured. Its rubric's
functions become parts of the reward, times their weights; functions of weight zero are recorded as metrics.
"""

import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.errors import LoopwrightError, MissingExtra
from loopwright.core.imports import look_first_in
from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.remote.agent import RolloutFailed
from loopwright.rollouts.tasks.environment import EnvironmentTasks, brings, environment_score
from loopwright.rollouts.tasks.http_clients import shared_http_client
from loopwright.rollouts.tasks.sources import TasksError

log = logging.getLogger(__name__)
_MODEL = "policy"
_calls: ContextVar[list["_Call"]] = ContextVar("calls")
"""The calls of reward functions in this rollout."""
_Call = tuple[str, float, float | Exception]
"""Name, weight, and the value or the exception."""
_TASKSETS = "loopwright.rollouts.tasks.verifiers_v1"
"""Imported where it is used: it needs verifiers."""


class VerifiersTasks(EnvironmentTasks):
    """An environment of the `verifiers` package, with its own tools and rubric."""

    brings: ClassVar[Mapping[str, Mapping[str, Any]]] = brings(f"{__name__}:attempt")
    type: Literal["verifiers"] = "verifiers"
    env: str
    """The environment's id: the name of its package, or of a module beside the scenario."""
    split: Literal["train", "eval"] = "train"
    """Its dataset for training or the one for evaluation."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """For a taskset of `verifiers.v1`: settings of its agent, such as `harness`, `runtime` and `max_turns`."""

    def label(self) -> str:
        return self.name or (self.env if self.split == "train" else f"{self.env}.eval")

    def rows(self, scenario_dir: Path) -> Iterable[Mapping[str, Any]]:
        look_first_in(scenario_dir)
        if _is_taskset(self.env):
            if self.split == "eval":
                raise TasksError(f"taskset {self.env!r} has no split; choose its tasks with `args`")
            taskset = {"env": self.env, "args": self.args, "agent": self.agent}
            for row in import_module(_TASKSETS).load_taskset(json.dumps(taskset, sort_keys=True)).rows(self.limit):
                yield {**row, "environment": {**taskset, **row["environment"]}}
            return
        if self.agent:
            raise TasksError(f"`agent` is for tasksets of verifiers.v1; {self.env!r} has a `load_environment`")
        environment = load(self.env, json.dumps(self.args, sort_keys=True))
        dataset = dataset_of(environment, self.split)
        names = [name for name in ("prompt", "answer") if name in dataset.column_names]
        columns = dataset.select_columns(names)[: self.limit]  # at once: row by row takes fifty times as long
        labels = columns.get("answer", repeat(None))
        for index, (prompt, label) in enumerate(zip(columns["prompt"], labels, strict=False)):
            place = {"env": self.env, "args": self.args, "split": self.split, "index": index}
            yield {"messages": _messages(prompt), "label": label, "environment": place}


def _is_taskset(env: str) -> bool:
    """Whether this is a taskset of `verifiers.v1` and nothing older."""
    try:
        return not hasattr(import_module("verifiers.v1").import_taskset(env), "load_environment")
    except ModuleNotFoundError:
        return False  # `load` says what is missing


@functools.cache
def load(env: str, args: str) -> Any:
    """The environment with these arguments, as JSON, with a rubric that reports the calls of its functions."""
    try:
        verifiers = import_module("verifiers")
    except ModuleNotFoundError as error:
        raise MissingExtra("an environment of verifiers", "verifiers") from error
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "this version")
        raise TasksError(f"verifiers {version} has no `load_environment`. Run: pip install 'loopwright[verifiers]'")
    import_module("datasets").disable_progress_bars()  # in the middle of our own output
    try:
        environment = verifiers.load_environment(env, **json.loads(args))
    except ValueError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        fix = "Install its package, or place its module beside the scenario"
        raise TasksError(f"environment {env!r} cannot be imported: {error.__cause__}. {fix}") from error
    if environment.requires_group_rollouts:
        raise TasksError(f"environment {env!r} scores a whole group at a time, which rollouts of one task cannot do")
    for each in _environments(environment):
        _watch(each.rubric)
    return environment


def dataset_of(environment: Any, split: str) -> Any:
    """The dataset of a split; TasksError if there is none, instead of another one."""
    dataset = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    if dataset is None:
        other = "eval" if split == "train" else "train"
        raise TasksError(f'the environment has no dataset for split = "{split}"; set split = "{other}"')
    return dataset


async def attempt(task: Task, base_url: str, api_key: str) -> Any:
    """One rollout of an environment, and its score. RolloutFailed says who is at fault if there is none."""
    place = task.extra["environment"]
    if "hash" in place:
        return await import_module(_TASKSETS).attempt(task, base_url, api_key)
    try:
        environment = load(place["env"], json.dumps(place["args"], sort_keys=True))
        row = dataset_of(environment, place["split"])[place["index"]]
    except LoopwrightError as error:
        raise RolloutFailed(str(error), Fault.WORKLOAD) from error
    if Task.of({"prompt": _messages(row["prompt"])}, id=task.id).messages != task.messages:
        reason = f"row {place['index']} of {place['env']!r} differs from when the run started; make its order fixed"
        raise RolloutFailed(reason, Fault.WORKLOAD)
    openai, clients = import_module("openai"), import_module("verifiers.clients")
    async with shared_http_client(verify=base_url.startswith("https")) as http:
        sdk = openai.AsyncOpenAI(base_url=f"{base_url}/", api_key=api_key, http_client=http)
        sdk._platform = "Unknown"  # for a header; otherwise each client looks it up in a thread
        client = clients.OpenAIChatCompletionsClient(sdk)
        try:
            state = await environment.rollout(row, client, _MODEL, deepcopy(environment.sampling_args))
        except Exception as error:
            reason = f"environment {place['env']!r} raised {describe_error(error)}"
            raise RolloutFailed(reason, Fault.WORKLOAD) from error
        failure = state.get("error")
        fault = None if failure is None else _fault(failure)
        if fault not in (None, Fault.POLICY):
            raise RolloutFailed(f"environment {place['env']!r}: {_chain(failure)}", fault)
        score = await _score(environment, state)
        if fault is not None:
            raise RolloutFailed(_chain(failure), fault, score)
        return score


async def _score(environment: Any, state: Any) -> Any:
    calls: list[_Call] = []
    _calls.set(calls)
    try:
        await environment.rubric.score_rollout(state)
    except Exception as error:  # noqa: BLE001  a user's rubric may raise anything
        calls.append(("rubric", 1.0, error))
    try:
        await environment.rubric.cleanup(state)
    except Exception as error:  # noqa: BLE001  the score stays valid
        log.warning("the rubric was not cleaned up completely: %s", describe_error(error))
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, weight, value in calls:
        if isinstance(value, Exception):
            # verifiers itself would count it as zero.
            return {"error": f"reward function {name!r} raised {describe_error(value)}"}
        into = parts if weight else metrics
        into[name] = into.get(name, 0.0) + (weight * value if weight else value)
    return environment_score(parts, metrics, float(state["reward"]))


def _fault(failure: BaseException) -> Fault:
    """Who caused the error that ended a rollout."""
    errors = import_module("verifiers.errors")
    openai = import_module("openai")
    if isinstance(failure, errors.InfraError):
        return Fault.INFRA
    if isinstance(failure, errors.ModelError):
        # What the gateway refuses, such as one turn too many, is the policy's; a gateway that is away is not.
        causes = list(_causes(failure))
        away = any(isinstance(cause, openai.APIConnectionError | openai.InternalServerError) for cause in causes)
        return Fault.INFRA if away else Fault.POLICY
    return Fault.POLICY if isinstance(failure, errors.ToolError | errors.OverlongPromptError) else Fault.WORKLOAD


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _chain(failure: BaseException) -> str:
    return " from ".join(describe_error(cause).rstrip(": ") for cause in _causes(failure))


def _environments(environment: Any) -> Iterator[Any]:
    """An environment and those that it groups."""
    yield environment
    for each in getattr(environment, "envs", ()):
        yield from _environments(each)


def _watch(rubric: Any) -> None:
    """Make the functions of a rubric report their calls, exceptions included, which the rubric hides."""
    for each in getattr(rubric, "rubrics", ()):
        _watch(each)
    rubric.funcs = [
        function if hasattr(function, "is_watched") else _watched(function, rubric, index)
        for index, function in enumerate(rubric.funcs)
    ]


def _watched(function: Callable[..., Any], rubric: Any, index: int) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        name, weight, calls = getattr(function, "__name__", "reward"), rubric.weights[index], _calls.get([])
        try:
            value = function(*args, **kwargs)
            value = float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            calls.append((name, weight, error))
            raise
        calls.append((name, weight, value))
        return value

    call.is_watched = True  # type: ignore[attr-defined]
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # the rubric asks for it at each call
    return call


def _messages(prompt: Any) -> list[dict[str, Any]]:
    """The prompt as plain messages, without the empty columns that a table adds."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]
