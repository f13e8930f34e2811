"""The remote worker: runs an agent for each request, and leaves no process or file behind."""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.reaper import Reaper
from loopwright.gateway.client import GatewayClient, GatewayLost
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, Worker
from loopwright.rollouts.pools.steps import WatchedCall, current_call
from loopwright.rollouts.remote.agent import CommandAgent, FunctionAgent
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import GatewayAccess, SessionOpener
from loopwright.rollouts.remote.rollout import RemoteRollout, RolloutContext, WorkspaceHook
from loopwright.rollouts.tasks.harbor.source import TaskLocator


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A requested rollout, and the gateway that its agent samples through."""

    access: GatewayAccess
    request: RolloutRequest
    on_workspace: WorkspaceHook | None = None
    """Inspects the workspace before it is deleted."""

    @property
    def loop(self) -> str:
        """The name of its loop."""
        return self.request.loop


class RemoteWorker(Worker):
    """Turns requests into episodes. The processes of a rollout end with it, even if this process is killed.

    Its files are deleted soon after, and at the latest when the worker is closed. `sessions` opens sessions at a
    gateway in this process; without it, they are opened over HTTP.
    """

    def __init__(
        self,
        config: RemoteConfig,
        scenario_dir: Path,
        *,
        run: str = "",
        passed_env: Mapping[str, str] | None = None,
        run_tests: bool = False,
        sessions: SessionOpener | None = None,
    ) -> None:
        self._config, self._sessions, self._closed = config, sessions, False
        self._executor = LocalExecutor(parallel=config.concurrency, output_bytes=config.output)
        self._reaper, self._numbers = Reaper("agent"), count(1)
        self._clients: dict[GatewayAccess, GatewayClient] = {}
        sandbox = config.build_sandbox(scenario_dir)
        sandbox.check()
        agent = (
            CommandAgent(config, scenario_dir, passed_env or {}, self._executor)
            if config.function is None
            else FunctionAgent(config, scenario_dir)
        )
        locator = TaskLocator(scenario_dir, config.task_root, config.task_template)
        self._context = RolloutContext(config, run, agent, sandbox, self._executor, locator, run_tests)

    async def handle(self, request: RemoteRequest) -> Episode:
        if self._closed:
            raise GatewayLost("the worker is closed")
        call, deadline_s = current_call.get() or WatchedCall(), self._config.deadline_s
        call.limit_s = deadline_s
        self._reaper.start()
        sessions = self._sessions or self._client(request.access)
        marker, context = f"{self._reaper.marker}.{next(self._numbers)}", self._context
        has_directory = (
            context.agent.needs_directory
            or request.on_workspace is not None
            or context.locator.names_directory(request.request.task)
        )
        directory = self._reaper.directory / "none"
        if has_directory:
            directory = Path(tempfile.mkdtemp(dir=self._reaper.directory, prefix="trial-"))
        rollout = RemoteRollout(
            context, sessions, request.request, directory, marker, request.on_workspace, has_directory=has_directory
        )
        try:
            episode = await rollout.run()
            if episode.fault is not None and call.blocked_s >= deadline_s / 2:  # an agent that is a function
                reason = call.describe_blocking(self.describe_calls(), deadline_s)
                episode = episode.failed(Outcome.TIMEOUT, Fault.WORKLOAD, reason)
            return episode
        except (GatewayLost, PoolDown):
            raise
        except Exception as error:  # noqa: BLE001  an agent of the user's may raise anything
            return Episode(request.request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, describe_error(error))

    def describe_calls(self) -> str:
        return self._config.function or type(self).__name__

    def _client(self, access: GatewayAccess) -> GatewayClient:
        """The client of a gateway; there is one for each, and a gateway that was restarted is another one."""
        if access not in self._clients:
            # Shorter than a rollout, so that a rollout whose gateway stays away can report it.
            away_s = min(access.away_s, self._config.deadline_s / 2)
            self._clients[access] = GatewayClient(
                access.url, access.token, connections=2 * self._config.concurrency, away_s=away_s
            )
        return self._clients[access]

    async def close(self) -> None:
        self._closed = True
        await self._executor.close()
        if self._context.teardowns:
            await asyncio.wait(self._context.teardowns)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        await asyncio.to_thread(self._reaper.close)
