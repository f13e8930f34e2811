"""A gateway elsewhere that samples from the engine of this process."""

import asyncio
import logging
from collections.abc import Callable

from loopwright.engines.base import Engine
from loopwright.gateway.client import GatewayLost
from loopwright.gateway.relay.worker import RelayWorker, WorkerRefused
from loopwright.rollouts.remote.gateway_host import ExternalGatewayHost, GatewayAccess

log = logging.getLogger(__name__)


class RelayGatewayHost(ExternalGatewayHost):
    """A gateway that was started with `--relay`, which this process serves as a worker.

    A gateway that has engines is used as it is: they must have the weights of the policy that is trained.
    """

    def __init__(self, access: GatewayAccess, build_engine: Callable[[], Engine]) -> None:
        super().__init__(access)
        self._build_engine = build_engine
        self._engine: Engine | None = None
        self._worker: RelayWorker | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._engine = self._build_engine()
        url = f"{self._access.url.rstrip('/').replace('http', 'ws', 1)}/ws/worker"
        self._worker = RelayWorker(self._engine, url, self._access.token or "")
        self._serving = asyncio.ensure_future(self._worker.run())
        connecting = asyncio.ensure_future(super().start())  # a relay waits for its first worker
        await asyncio.wait({self._serving, connecting}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done() and (error := self._serving.exception()) is not None:
            if not isinstance(error, WorkerRefused) or "accepts no workers" not in str(error):
                connecting.cancel()
                raise GatewayLost(str(error)) from error
            log.warning("%s has its own engines; they must serve the weights that verl trains", self._access.url)
        await connecting

    async def aclose(self) -> None:
        await super().aclose()
        if self._worker is not None and self._serving is not None:
            self._worker.stop()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
