"""The remote worker: starts agents for the trials it is given, and never leaves one behind."""

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
from loopwright.rollouts.pools.base import Worker
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.agent import CommandAgent, FunctionAgent
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.rollout import Keep, RemoteRollout, RolloutContext
from loopwright.rollouts.tasks.harbor.source import TaskLocator


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A rollout to be made, and the gateway that it is made at."""

    access: GatewayAccess
    request: RolloutRequest
    keep: Keep | None = None
    """What is to look at the workspace before it is gone."""


class RemoteWorker(Worker):
    """Answers an order with an episode. Processes of a trial are gone with it, also if we are killed.

    Its files are gone soon after, and when the worker is closed at the latest.
    """

    def __init__(
        self,
        config: RemoteConfig,
        home: Path,
        *,
        run: str = "",
        passed: Mapping[str, str] | None = None,
        verifies: bool = False,
    ) -> None:
        self._config, self._closed = config, False
        self._executor = LocalExecutor(parallel=config.concurrency, output_bytes=config.output)
        self._reaper, self._numbers = Reaper("agent"), count(1)
        self._clients: dict[GatewayAccess, GatewayClient] = {}
        sandbox = config.walls(home)
        sandbox.check()
        agent = (
            CommandAgent(config, home, passed or {}, self._executor)
            if config.command is not None
            else FunctionAgent(config, home)
        )
        places = TaskLocator(home, config.task_root, config.task_template)
        self._means = RolloutContext(config, run, agent, sandbox, self._executor, places, verifies)

    async def handle(self, order: RemoteRequest) -> Episode:
        if self._closed:
            raise GatewayLost("the worker was closed")
        self._reaper.start()
        client = await self._client(order.access)
        directory = Path(tempfile.mkdtemp(dir=self._reaper.directory, prefix="trial-"))
        marker = f"{self._reaper.marker}.{next(self._numbers)}"
        trial = RemoteRollout(self._means, client, order.request, directory, marker, order.keep)
        try:
            return await trial.run()
        except GatewayLost:
            raise
        except Exception as error:  # noqa: BLE001  an agent of the user's own may do anything
            return Episode(order.request.task).failed(Outcome.CRASHED, Fault.WORKLOAD, describe_error(error))

    async def _client(self, access: GatewayAccess) -> GatewayClient:
        """The client of a gateway: one, for as long as the gateway stays where it is."""
        if access not in self._clients:
            former, self._clients = self._clients, {}
            # Less than a trial's time, so that one whose gateway stays away says so.
            away_s = min(access.away_s, self._config.deadline_s / 2)
            self._clients[access] = GatewayClient(
                access.url, access.token, connections=2 * self._config.concurrency, away_s=away_s
            )
            await asyncio.gather(*(client.close() for client in former.values()))
        return self._clients[access]

    async def close(self) -> None:
        self._closed = True
        await self._executor.close()
        if self._means.leaving:
            await asyncio.wait(self._means.leaving)
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        await asyncio.to_thread(self._reaper.close)
