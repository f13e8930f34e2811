"""Tasksets of `verifiers.v1`: verifiers' agent attempts and scores each task, sampling through our gateway.

Imported only where verifiers is installed. Rewards become parts of our reward, times their weights; a reward of weight
zero is a metric.
"""

import asyncio
import functools
import itertools
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, program
from verifiers.v1.mcp import serve_shared
from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing
from verifiers.v1.utils.decorators import invoke

from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.remote.agent import RolloutFailed
from loopwright.rollouts.tasks.environment import environment_score
from loopwright.rollouts.tasks.http_clients import shared_http_client
from loopwright.rollouts.tasks.sources import TasksError

_INFRA = ("SandboxError", "InterceptionError", "TunnelError")
_DOCKER = 'for example agent = { runtime = { type = "docker" } }'


class ChatHarness(NullHarness):  # type: ignore[misc]  # verifiers has no types
    """The loop of verifiers' `null` program in this process: nothing is installed and no process is started for it."""

    async def setup(self, runtime: Any) -> None:
        pass

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any
    ) -> Any:
        system_prompt, prompt = self.resolve_prompt(data)
        conversation = _messages(system_prompt, prompt)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        tools, dispatch, servers = await program.connect_mcp({"mcpServers": servers})
        async with shared_http_client(verify=False) as http:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, timeout=None)
            while True:
                message = await program.chat(client, ctx.model, conversation, tools)
                conversation.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    content = await _call_tool(servers, dispatch, call.function)
                    conversation.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _call_tool(servers: Any, dispatch: Any, function: Any) -> Any:
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not valid JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    if function.name not in dispatch:
        return f"error: unknown tool {function.name!r}"
    return await program.call_mcp(servers, dispatch, function.name, arguments)


class LoadedTaskset:
    """A taskset, the configuration of the agent that attempts its tasks, and the tasks loaded so far."""

    def __init__(self, env: str, args: Mapping[str, Any], agent: Mapping[str, Any]) -> None:
        if vf.environment_class(env) is not vf.SingleAgentEnv:
            raise TasksError(f"{env!r} has its own `Env`, with several agents; only tasksets can be used")
        self.env = env
        try:
            self.taskset = vf.load_taskset(vf.taskset_config_type(env).model_validate({**args, "id": env}))
            self.agent_config = _agent_config(env, agent)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise TasksError(f"taskset {env!r}: {'; '.join(problems)}") from error
        self.tools = self.taskset.toolsets(self.taskset.config)
        if self.tools or type(self.taskset).task_type().toolsets(self.taskset.config.task):
            _let_servers_import(type(self.taskset).__module__)
        self._rest = iter(self.taskset)
        self._tasks: list[Any] = []
        self._servers: dict[asyncio.AbstractEventLoop, _Servers] = {}

    def task(self, index: int) -> Any:
        """A task by its position. IndexError if there are fewer."""
        self._tasks += itertools.islice(self._rest, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]

    def rows(self, limit: int | None) -> Iterator[dict[str, Any]]:
        """The tasks as rows, at most `limit` of them."""
        if limit is None and self.taskset.INFINITE:
            raise TasksError(f"taskset {self.env!r} has no end: set `limit`")
        harness = vf.load_harness(self.agent_config.harness)
        for index in itertools.count() if limit is None else range(limit):
            try:
                task = self.task(index)
            except IndexError:
                return
            if task.data.prompt is None:
                raise TasksError(f"task {index} of {self.env!r} has no prompt, so an agent alone cannot attempt it")
            try:
                runtime = resolve_runtime_config(self.agent_config.runtime, task, set())
                tools = [*task.toolsets(task.config), *self.tools]
                validate_pairing(harness, type(task), runtime, tools=tools)
            except ValueError as error:
                raise TasksError(f"taskset {self.env!r}: {error} Set it with `agent`, {_DOCKER}.") from error
            messages = _messages(task.data.system_prompt, task.data.prompt)
            label = task.data.model_dump(mode="json").get("answer")
            yield {"messages": messages, "label": label, "environment": {"index": index, "hash": task.hash}}

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[Mapping[str, Any]]:
        """The tool servers of the whole taskset, for all rollouts of this event loop that run at the same time."""
        loop = asyncio.get_running_loop()
        servers = self._servers.setdefault(loop, _Servers())
        servers.users += 1
        try:
            async with servers.lock:
                if servers.urls is None:
                    servers.urls = await servers.stack.enter_async_context(serve_shared(self.tools))
            yield servers.urls
        finally:
            servers.users -= 1
            if not servers.users:
                del self._servers[loop]
                await servers.stack.aclose()


class _Servers:
    def __init__(self) -> None:
        self.users, self.lock, self.stack = 0, asyncio.Lock(), AsyncExitStack()
        self.urls: Any = None


@functools.cache
def load_taskset(place: str) -> LoadedTaskset:
    """The taskset `env` with its `args` and the settings of its `agent`, all as JSON."""
    return LoadedTaskset(**json.loads(place))


def _agent_config(env: str, settings: Mapping[str, Any]) -> Any:
    """The agent's settings. Unless they or the taskset say otherwise, it only chats and calls the taskset's tools."""
    default = vf.default_harness_id(env)
    harness = {"id": "null" if default == "bash" else default}
    config = vf.AgentConfig.model_validate(
        {"harness": harness, "runtime": {"type": "subprocess"}, **settings, "model": "policy"}
    )
    if vf.load_harness(config.harness).EXECUTES_CODE and "runtime" not in settings:
        reason = f"harness {config.harness.id!r} executes what the policy writes"
        raise TasksError(f"taskset {env!r}: {reason}: say where with `agent`, {_DOCKER}")
    return config


def _let_servers_import(module: str) -> None:
    """Tool servers are processes that import the taskset's module, which may be beside the scenario."""
    top = sys.modules[module.partition(".")[0]]
    place = Path(top.__file__ or "").parent
    directory = str(place.parent if hasattr(top, "__path__") else place)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if directory not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([directory, *paths])


async def attempt(task: Task, base_url: str, api_key: str) -> Any:
    """One rollout of a task, and its score. RolloutFailed says who is at fault if there is none."""
    place = task.extra["environment"]
    env, index = place["env"], place["index"]
    try:
        settings = {name: place[name] for name in ("env", "args", "agent")}
        loaded = load_taskset(json.dumps(settings, sort_keys=True))
        theirs = loaded.task(index)
    except (TasksError, IndexError) as error:
        raise RolloutFailed(f"task {index} of {env!r} cannot be loaded: {error}", Fault.WORKLOAD) from error
    if theirs.hash != place["hash"]:
        reason = f"task {index} of {env!r} differs from when the run started; make its order fixed"
        raise RolloutFailed(reason, Fault.WORKLOAD)
    variable = f"LOOPWRIGHT_API_KEY_{secrets.token_hex(8)}"  # verifiers takes keys from variables; hides "API_KEY"
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    agent = vf.Agent(loaded.agent_config.model_copy(update={"client": client}))
    if agent.config.harness.id == "null":
        agent.harness = ChatHarness(agent.config.harness)
    os.environ[variable] = api_key
    try:
        async with loaded.servers() as tools, agent.provision(theirs) as box:
            trace = await agent.run(theirs, runtime=box, tools=tools)
            return await _score(env, theirs, trace, box)
    except RolloutFailed:
        raise
    except Exception as error:
        fault = Fault.INFRA if type(error).__name__ in _INFRA else Fault.WORKLOAD
        raise RolloutFailed(f"taskset {env!r} raised {describe_error(error)}", fault) from error
    finally:
        del os.environ[variable]


async def _score(env: str, task: Any, trace: Any, box: Any) -> Any:
    """The rewards of a trace as parts. RolloutFailed if the rollout failed or was cut."""
    if trace.ok:
        score = _parts(trace)
        if trace.is_truncated:
            reason = trace.stop_condition if trace.stop_condition != "agent_completed" else "the last answer was cut"
            raise RolloutFailed(f"taskset {env!r}: {reason}", Fault.POLICY, score)
        return score
    error = trace.last_error
    reason = f"{error.type}: {error.message}"
    if trace.timing.scoring.start:
        return {"error": reason}
    if error.type in _INFRA or (error.status_code or 0) >= 500:
        raise RolloutFailed(f"taskset {env!r}: {reason}", Fault.INFRA)
    if error.status_code is None:
        raise RolloutFailed(f"taskset {env!r}: {reason}", Fault.WORKLOAD)
    # What the gateway refuses, such as one turn too many, is the policy's: it is scored as it stands.
    try:
        await invoke(task.finalize, {"trace": trace, "runtime": box})
        await task.score(trace, box)
        score = _parts(trace)
    except Exception as failure:  # noqa: BLE001  a user's reward may raise anything
        score = {"error": describe_error(failure)}
    raise RolloutFailed(reason, Fault.POLICY, score)


def _parts(trace: Any) -> Any:
    rewards = trace.rewards.items()
    parts = {name: reward.value for name, reward in rewards if reward.weight}
    zero_weight = {name: reward.score for name, reward in rewards if not reward.weight}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return environment_score(parts, {**metrics, **zero_weight}, trace.reward)


def _messages(system_prompt: str | None, prompt: Any) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if isinstance(prompt, str):
        return [*system, {"role": "user", "content": prompt}]
    return [*system, *(message_to_wire(message) for message in prompt)]
