"""Shared by the tests of remote agents: a pool with an embedded gateway, and agents that are small programs."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from loopwright.core.task import Task
from loopwright.gateway.gateway import GatewayConfig
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from loopwright.rollouts.remote.worker import RemoteWorker
from tests.gateway.harness import Replier, until

TASK = Task("t", ({"role": "user", "content": "What is it?"},), "secret label")
CHAT = """
import json, os, subprocess, sys, time, urllib.request

def chat(text="hi"):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

"""


def program(directory: Path, text: str, *arguments: str) -> tuple[str, ...]:
    """The command of an agent that runs this code."""
    (directory / "agent.py").write_text(CHAT + text)
    return (sys.executable, "{home}/agent.py", *arguments)


class RemoteSetup:
    """A pool of one remote worker with its gateway and engine."""

    def __init__(self, directory: Path, engine=None, *, run_tests=False, over_http=False, **config):
        self.engine = engine or Replier("an answer")
        self.config = RemoteConfig(**{"deadline_s": 20.0, **config})
        self.host = EmbeddedGatewayHost(GatewayConfig(), lambda: self.engine)
        self.worker = None
        self._scenario_dir, self._run_tests, self._over_http = directory, run_tests, over_http
        self.pool = GatewayPool(self.host, LocalPool(self._build))

    def _build(self):
        sessions = None if self._over_http else self.host.local_sessions()
        self.worker = RemoteWorker(
            self.config, self._scenario_dir, run="r", run_tests=self._run_tests, sessions=sessions
        )
        return self.worker

    async def roll(self, task=TASK, seed="0", trial=1, timeout_s=60.0):
        return await self.pool.call(RolloutRequest(task, seed, trial=trial), timeout_s=timeout_s)

    @property
    def sessions(self):
        return list(self.host._gateway.sessions.values())

    @property
    def directory(self) -> Path:
        """The directory with the workspaces of its rollouts."""
        return self.worker._reaper.directory


@asynccontextmanager
async def open_setup(directory, engine=None, **config):
    setup = RemoteSetup(directory, engine, **config)
    await setup.pool.start()
    try:
        yield setup
    finally:
        await setup.pool.close()


def run_agent(directory, text, engine=None, arguments=(), **config):
    """The episode of one rollout of an agent that runs this code."""

    async def main():
        async with open_setup(directory, engine, command=program(directory, text, *arguments), **config) as setup:
            episode = await setup.roll()
            assert [session.status for session in setup.sessions] == ["complete"], "the session is always released"
            await until(lambda: list(setup.directory.iterdir()) == [], 20.0)  # the workspace, too
            return episode

    return asyncio.run(asyncio.wait_for(main(), 100))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running(marker: str) -> list[int]:
    """The processes with this text in their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in pids if alive(pid)]


_SCENARIO = """
name = "remote"
[[run]]
name = "work"
agent = {{ type = "collect", trials = 6, group_size = 2 }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "remote", command = {command}, deadline_s = 60, concurrency = 2{loop} }}
judger = {{ type = "python", function = "judge:exact" }}
{more}
"""
ENGINE = '[run.engine]\ntype = "scripted"\nreplies = ["yes"]\nslip = 0.0\n'


def scenario(directory, text, *, loop="", more=ENGINE):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tasks.jsonl").write_text('{"prompt": "is it?", "label": "yes"}\n' * 3)
    (directory / "judge.py").write_text("def exact(answer, label):\n    return float(answer == label)\n")
    command = json.dumps(list(program(directory, text, "{instruction}")))
    return _SCENARIO.format(command=command, loop=loop, more=more)


_FUNCTIONS = """
import aiohttp

async def solve(task, base_url, api_key, state, more=()):
    assert state == {"trials": []}, state
    state["trials"].append(task.id)
    headers = {"authorization": f"Bearer {api_key}"}
    body = {"model": "m", "messages": list(task.messages)}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            return {"reply": (await response.json())["choices"][0]["message"]["content"], "more": more}

async def rewrite(task):
    task.messages[0]["content"] = f"not {task.messages[0]['content']}"
    task.extra["state"].append(task.id)
    return {"label": task.label, "state": task.extra["state"], "content": task.messages[0]["content"]}

async def with_unknown_parameter(task, moon):
    ...

async def ignore_cancellation():
    import asyncio
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(1000)  # until the event loop itself ends

async def block(base_url):
    import urllib.request
    urllib.request.urlopen(base_url)  # waits for a server that waits for it

def not_async(task):
    ...
"""


def write_functions(directory):
    """Write a module of agent functions, and return its name."""
    name = f"my_agents_{directory.name.replace('-', '_')}"
    (directory / f"{name}.py").write_text(_FUNCTIONS)
    return name
