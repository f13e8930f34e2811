"""What the tests of remote agents share: a gateway of the test's own, and agents that are small programs."""

import asyncio
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
from tests.gateway.serving import Teller, until

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


def program(home: Path, text: str, *arguments: str) -> tuple[str, ...]:
    """The command of an agent that does this."""
    (home / "agent.py").write_text(CHAT + text)
    return (sys.executable, "{home}/agent.py", *arguments)


class Stage:
    """A pool of one remote worker with its gateway, and the engine behind it."""

    def __init__(self, home: Path, engine=None, *, verifies=False, **config):
        self.engine = engine or Teller("an answer")
        self.config = RemoteConfig(**{"deadline_s": 20.0, **config})
        self.home = EmbeddedGatewayHost(GatewayConfig(), lambda: self.engine)
        self.worker = None
        self._make = lambda: RemoteWorker(self.config, home, run="r", verifies=verifies)
        self.pool = GatewayPool(self.home, LocalPool(self._made))

    def _made(self):
        self.worker = self._make()
        return self.worker

    async def roll(self, task=TASK, seed="0", trial=1, timeout_s=60.0):
        return await self.pool.call(RolloutRequest(task, seed, trial=trial), timeout_s=timeout_s)

    @property
    def sessions(self):
        return list(self.home._gateway._sessions.values())

    @property
    def directory(self) -> Path:
        """Where the workspaces of its trials are."""
        return self.worker._reaper.directory


@asynccontextmanager
async def staged(home, engine=None, **config):
    stage = Stage(home, engine, **config)
    await stage.pool.start()
    try:
        yield stage
    finally:
        await stage.pool.close()


def rolled(home, text, engine=None, arguments=(), **config):
    """The episode of an agent that does this, once."""

    async def story():
        async with staged(home, engine, command=program(home, text, *arguments), **config) as stage:
            episode = await stage.roll()
            assert [live.status for live in stage.sessions] == ["complete"], "the session is always released"
            await until(lambda: list(stage.directory.iterdir()) == [], 20.0)  # the workspace, too
            return episode

    return asyncio.run(asyncio.wait_for(story(), 100))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running(marker: str) -> list[int]:
    """The processes whose command line holds this."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if alive(pid)]
