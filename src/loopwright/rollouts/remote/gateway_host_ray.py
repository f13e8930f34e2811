"""Gateways in Ray actors, with engines in further actors."""

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from loopwright.engines.base import EngineError
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayClient, GatewayLost
from loopwright.gateway.gateway import Gateway
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.rollouts.engine_pool_ray import START_S, EngineClient, EnginePool
from loopwright.rollouts.pools.base import Worker, WorkerLost
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.remote.gateway_config import RayGatewayConfig
from loopwright.rollouts.remote.gateway_host import AgentSession, GatewayAccess, GatewayHost, check_reachable


class GatewayWorker(Worker):
    """A gateway in an actor; it starts when it is first asked for its address."""

    def __init__(self, config: RayGatewayConfig, engines: EngineClient, token: str) -> None:
        self._config, self._engines, self._token = config, engines, token
        self._gateway: Gateway | None = None
        self._start_lock = asyncio.Lock()

    async def handle(self, request: str) -> GatewayAccess:
        return GatewayAccess((await self._start()).address, self._token)

    async def apply_update(self, update: WeightUpdate) -> int:
        return await (await self._start()).apply_update(update)

    async def _start(self) -> Gateway:
        async with self._start_lock:
            if self._gateway is None:
                config = self._config
                if config.needs_node_address:
                    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                    config = config.model_copy(update={"advertise_host": address})
                gateway = Gateway(self._engines.connect(), config, token=self._token, forgets=True)
                await gateway.__aenter__()
                self._gateway = gateway
            return self._gateway

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)
            await self._gateway.engine.close()


class RayGatewayHost(GatewayHost):
    """Gateways and their engines in actors; an actor that dies is replaced, and its rollouts are repeated.

    Like an embedded gateway they store nothing on disk: the agents end with the run, and nobody else can continue their
    sessions.
    """

    def __init__(self, config: RayGatewayConfig, engines: EnginePool, **options: Any) -> None:
        super().__init__()
        self._engines, self._count = engines, config.workers
        build = partial(GatewayWorker, config, engines.client, secrets.token_urlsafe(24))
        self._gateways = RayPool(build, **options)
        self._openers: dict[str, GatewayClient] = {}
        """The gateway of each session that was opened here under an id."""

    async def start(self) -> None:
        await self._engines.start()
        await self._gateways.start()
        for _ in range(self._count):  # each gets a call in turn
            await check_reachable((await self.access()).url)

    async def access(self) -> GatewayAccess:
        try:
            access: GatewayAccess = await self._gateways.call("access", timeout_s=START_S)
        except (WorkerLost, TimeoutError, EngineError) as error:
            raise GatewayLost(f"the gateway's actor does not answer: {error}") from error
        return access

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> AgentSession:
        if id is not None and id in self._openers:
            with suppress(GatewayLost):  # its gateway was replaced
                return await self._openers[id].open(id, config)
        client = await self._connect()
        if id is not None:
            self._openers[id] = client
        return await client.open(id, config)

    async def publish(self, update: WeightUpdate) -> int:
        try:
            await self._engines.publish(update)
            return int(min(await self._gateways.publish(update)))
        except (WorkerLost, EngineError) as error:
            raise GatewayLost(f"the gateway's actor does not answer: {error}") from error

    async def aclose(self) -> None:
        await super().aclose()
        try:
            await self._gateways.close()
        finally:
            await self._engines.close()
