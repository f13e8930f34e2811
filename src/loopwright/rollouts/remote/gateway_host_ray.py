"""A gateway in a Ray actor, with engines in further actors that it finds by name."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from loopwright.engines.base import Chunk, Engine, EngineAway, EngineConfig, EngineError, Sampling, engines
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.tokenizer import Tokenizer
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayLost
from loopwright.gateway.gateway import Gateway
from loopwright.rollouts.pools.base import StreamingWorker, Worker, WorkerLost
from loopwright.rollouts.pools.ray.actor import first_line
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.pools.serialization import pack, unpack, unpack_exception
from loopwright.rollouts.remote.gateway_config import RayGatewayConfig
from loopwright.rollouts.remote.gateway_host import GatewayAccess, GatewayHost, check_reachable

_START_S = 300.0
"""Seconds that a gateway may take to start, including the tokenizer that it gets from an engine."""


class EngineWorker(StreamingWorker):
    """An engine in an actor."""

    def __init__(self, config: EngineConfig, scenario_dir: Path) -> None:
        self._engine = engines.get(config.type)(config, scenario_dir)

    async def handle(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        method, args = request
        if method == "about":
            return self._engine.tokenizer, self._engine.version, self._engine.steering
        await getattr(self._engine, method)(*args)
        return self._engine.version

    async def stream(self, request: tuple[Sequence[int], Sampling, str]) -> AsyncGenerator[Chunk, None]:
        ids, sampling, seed = request
        async for chunk in self._engine.generate(ids, sampling, seed=seed):
            yield chunk

    async def close(self) -> None:
        await self._engine.close()


class ActorEngine(Engine):
    """An engine in the actor of this name; the replacement of a dead actor has the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(EngineConfig(type="named"), Path())
        self.name = name
        self._handle: Any = None
        self._steering: frozenset[str] = frozenset()

    async def connect(self) -> None:
        """Find the actor, and get its engine's tokenizer and version."""
        self.tokenizer: Tokenizer
        self.tokenizer, self.version, self._steering = await self._call("about")

    @property
    def steering(self) -> frozenset[str]:
        return self._steering

    async def _actor(self) -> Any:
        if self._handle is None:
            try:
                self._handle = await asyncio.to_thread(ray.get_actor, self.name)
            except ValueError as error:
                raise EngineAway(f"actor {self.name} not found in the cluster") from error
        return self._handle

    async def _call(self, method: str, *args: Any) -> Any:
        actor = await self._actor()
        try:
            failure, answer = unpack(await actor.handle.remote(pack((0, None, None, (method, args)))))
        except RayError as error:
            self._handle = None
            raise EngineError(f"{self.name}: {first_line(error)}") from error
        if failure is not None:
            raise _as_engine_error(unpack_exception(failure, self.name))
        return answer

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        actor = await self._actor()
        pieces = actor.stream.remote(pack((list(ids), sampling, seed)))
        finished = False
        try:
            async for piece in pieces:
                failure, chunk = unpack(await piece)
                if failure is not None:
                    raise _as_engine_error(unpack_exception(failure, self.name))
                if chunk.version < self.version:
                    # It replaced a dead actor and has not loaded the current weights yet.
                    self.version = chunk.version
                    raise EngineAway(f"{self.name} has version {chunk.version} of the weights")
                finished = chunk.finish is not None
                yield chunk
        except RayError as error:
            self._handle = None
            raise EngineError(f"{self.name}: {first_line(error)}") from error
        finally:
            if not finished:
                with suppress(Exception):
                    ray.cancel(pieces)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def load_weights(self, source: Any, version: int) -> None:
        self.version = await self._call("load_weights", source, version)

    async def check(self) -> None:
        self.version = await self._call("check")


def _as_engine_error(error: BaseException) -> BaseException:
    """An exception of a remote engine: a ValueError is the request's fault, anything else is the engine's."""
    return error if isinstance(error, EngineError | ValueError) else EngineError(f"{type(error).__name__}: {error}")


class ActorFleet(Fleet):
    """The engines of a cluster as one engine."""

    def __init__(self, members: Sequence[ActorEngine]) -> None:
        super().__init__(FleetSettings(type="fleet"), Path())
        for engine in members:
            self.add(engine.name, engine)


class GatewayWorker(Worker):
    """A gateway in an actor; it starts when it is first asked for its address."""

    def __init__(self, config: RayGatewayConfig, engine_names: Sequence[str], token: str) -> None:
        self._config, self._engine_names, self._token = config, engine_names, token
        self._gateway: Gateway | None = None
        self._start_lock = asyncio.Lock()

    async def handle(self, request: str) -> GatewayAccess:
        return GatewayAccess((await self._start()).address, self._token)

    async def apply_update(self, update: WeightUpdate) -> int:
        return await (await self._start()).apply_update(update)

    async def _start(self) -> Gateway:
        async with self._start_lock:
            if self._gateway is None:
                members = [ActorEngine(name) for name in self._engine_names]
                await asyncio.gather(*(engine.connect() for engine in members))
                config = self._config
                if config.needs_node_address:
                    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
                    config = config.model_copy(update={"advertise_host": address})
                gateway = Gateway(ActorFleet(members), config, token=self._token, forgets=True)
                await gateway.__aenter__()
                self._gateway = gateway
            return self._gateway

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)
            await self._gateway.engine.close()


class RayGatewayHost(GatewayHost):
    """A gateway and its engines in actors; an actor that dies is replaced, and its rollouts are repeated.

    Like an embedded gateway it stores nothing on disk: the agents end with the run, and nobody else can continue their
    sessions.
    """

    def __init__(self, config: RayGatewayConfig, engine: EngineConfig, scenario_dir: Path, name: str) -> None:
        super().__init__()
        prefix = f"loopwright-{name}-{secrets.token_hex(4)}-engine"
        names = [f"{prefix}-{index}" for index in range(config.engines)]
        self._engines = RayPool(
            partial(EngineWorker, engine, scenario_dir),
            workers=config.engines,
            cpus=config.engine_cpus,
            memory_bytes=config.engine_memory,
            name="engine",
            actor_name=prefix,
            import_dir=scenario_dir,
            start_timeout_s=_START_S,
        )
        build = partial(GatewayWorker, config, names, secrets.token_urlsafe(24))
        self._gateway = RayPool(build, cpus=config.cpus, name="gateway", import_dir=scenario_dir)

    async def start(self) -> None:
        await self._engines.start()
        await self._gateway.start()
        check_reachable((await self.access()).url)

    async def access(self) -> GatewayAccess:
        try:
            access: GatewayAccess = await self._gateway.call("access", timeout_s=_START_S)
        except (WorkerLost, TimeoutError, EngineError) as error:
            raise GatewayLost(f"the gateway's actor does not answer: {error}") from error
        return access

    async def publish(self, update: WeightUpdate) -> int:
        try:
            (version,) = await self._gateway.publish(update)
        except (WorkerLost, EngineError) as error:
            raise GatewayLost(f"the gateway's actor does not answer: {error}") from error
        return int(version)

    async def aclose(self) -> None:
        await super().aclose()
        try:
            await self._gateway.close()
        finally:
            await self._engines.close()
