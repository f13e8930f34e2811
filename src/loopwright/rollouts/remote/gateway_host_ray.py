"""A gateway in a Ray actor, with engines in actors beside it that it finds by their names."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from loopwright.engines.base import (
    Chunk,
    Engine,
    EngineAway,
    EngineConfig,
    EngineError,
    Sampling,
    engines,
)
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.tokenizer import Tokenizer
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayLost
from loopwright.gateway.gateway import Gateway
from loopwright.rollouts.pools.base import Worker, WorkerLost
from loopwright.rollouts.pools.parcel import pack, unpack, unpack_exception
from loopwright.rollouts.pools.ray.actor import brief
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.gateway_host import GatewayHost, RayGatewayConfig, check_reachable

_START_S = 300.0
"""Seconds that a gateway may take to be there, with the tokenizer that it gets from an engine."""


class EngineWorker(Worker):
    """An engine in an actor of its own."""

    def __init__(self, config: EngineConfig, home: Path) -> None:
        self._engine = engines.get(config.type)(config, home)

    async def handle(self, request: tuple[str, tuple[Any, ...]]) -> Any:
        what, given = request
        engine = self._engine
        match what:
            case "about":
                return engine.tokenizer, engine.version
            case "pause":
                await engine.pause()
            case "resume":
                await engine.resume()
            case "load":
                await engine.load_weights(*given)
            case "check":
                await engine.check()
        return engine.version

    async def stream(self, request: tuple[Sequence[int], Sampling, str]) -> AsyncGenerator[Chunk, None]:
        ids, sampling, seed = request
        async for chunk in self._engine.generate(ids, sampling, seed=seed):
            yield chunk

    async def close(self) -> None:
        await self._engine.close()


class NamedEngine(Engine):
    """An engine in an actor of this name; one that takes a dead one's place has its name."""

    def __init__(self, name: str) -> None:
        super().__init__(EngineConfig(type="named"), Path())
        self.name = name
        self._handle: Any = None

    async def connect(self) -> None:
        """Find the actor, and learn what its engine reads and writes."""
        self.tokenizer: Tokenizer
        self.tokenizer, self.version = await self._ask("about")

    async def _actor(self) -> Any:
        if self._handle is None:
            try:
                self._handle = await asyncio.to_thread(ray.get_actor, self.name)
            except ValueError as error:
                raise EngineAway(f"there is no actor {self.name} on the cluster") from error
        return self._handle

    async def _ask(self, what: str, *given: Any) -> Any:
        actor = await self._actor()
        try:
            failure, answer = unpack(await actor.handle.remote(pack((None, None, (what, given)))))
        except RayError as error:
            self._handle = None
            raise EngineError(f"{self.name}: {brief(error)}") from error
        if failure is not None:
            raise _as_engine_error(unpack_exception(failure, self.name))
        return answer

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        actor = await self._actor()
        pieces = actor.stream.remote(pack((list(ids), sampling, seed)))
        ended = False
        try:
            async for piece in pieces:
                failure, chunk = unpack(await piece)
                if failure is not None:
                    raise _as_engine_error(unpack_exception(failure, self.name))
                if chunk.version < self.version:
                    # It took a dead one's place and has yet to be given the weights that we think it has.
                    self.version = chunk.version
                    raise EngineAway(f"{self.name} has version {chunk.version} of the weights")
                ended = chunk.finish is not None
                yield chunk
        except RayError as error:
            self._handle = None
            raise EngineError(f"{self.name}: {brief(error)}") from error
        finally:
            if not ended:
                with suppress(Exception):
                    ray.cancel(pieces)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def load_weights(self, source: Any, version: int) -> None:
        self.version = await self._ask("load", source, version)

    async def check(self) -> None:
        self.version = await self._ask("check")


def _as_engine_error(error: BaseException) -> BaseException:
    """What an engine raised where it is: a ValueError is the request's fault, and anything else its own failure."""
    return error if isinstance(error, EngineError | ValueError) else EngineError(f"{type(error).__name__}: {error}")


class NamedFleet(Fleet):
    """The engines of a cluster as one."""

    def __init__(self, found: Sequence[NamedEngine]) -> None:
        super().__init__(FleetSettings(type="fleet"), Path())
        for engine in found:
            self.add(engine.name, engine)


class GatewayWorker(Worker):
    """A gateway in an actor; it opens when it is first asked where it is."""

    def __init__(self, config: RayGatewayConfig, names: Sequence[str], token: str) -> None:
        self._config, self._names, self._token = config, names, token
        self._gateway: Gateway | None = None
        self._opening = asyncio.Lock()

    async def handle(self, request: str) -> GatewayAccess:
        return GatewayAccess((await self._opened()).address, self._token)

    async def apply_update(self, update: WeightUpdate) -> int:
        return await (await self._opened()).apply_update(update)

    async def _opened(self) -> Gateway:
        async with self._opening:
            if self._gateway is None:
                found = [NamedEngine(name) for name in self._names]
                await asyncio.gather(*(engine.connect() for engine in found))
                gateway = Gateway(NamedFleet(found), self._here(), token=self._token, forgets=True)
                await gateway.__aenter__()
                self._gateway = gateway
            return self._gateway

    def _here(self) -> RayGatewayConfig:
        """The config, with the address of this node where agents would be given all addresses."""
        config = self._config
        if config.advertise is None and config.advertise_host is None and config.host in ("0.0.0.0", "::"):  # noqa: S104
            return config.model_copy(update={"advertise_host": ray.util.get_node_ip_address()})  # type: ignore[no-untyped-call]
        return config

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)
            await self._gateway.engine.close()


class RayGatewayHost(GatewayHost):
    """A gateway and its engines in actors; one that dies is replaced, and the rollouts it had are made again.

    Like an embedded gateway it keeps nothing on disk: who could go on with a session, the agents, are with the run.
    """

    def __init__(self, config: RayGatewayConfig, engine: EngineConfig, home: Path, name: str) -> None:
        super().__init__()
        named = f"loopwright-{name}-{secrets.token_hex(4)}-engine"
        names = [f"{named}-{index}" for index in range(config.engines)]
        self._engines = RayPool(
            partial(EngineWorker, engine, home),
            workers=config.engines,
            cpus=config.engine_cpus,
            memory_bytes=config.engine_memory,
            name="engine",
            named=named,
            home=home,
            start_timeout_s=_START_S,
        )
        build = partial(GatewayWorker, config, names, secrets.token_urlsafe(24))
        self._gateway = RayPool(build, cpus=config.cpus, name="gateway", home=home)

    async def start(self) -> None:
        await self._engines.start()
        await self._gateway.start()
        check_reachable((await self.access()).url)

    async def access(self) -> GatewayAccess:
        try:
            found: GatewayAccess = await self._gateway.call("access", timeout_s=_START_S)
        except (WorkerLost, TimeoutError, EngineError) as error:
            raise GatewayLost(f"the gateway's actor cannot be asked: {error}") from error
        return found

    async def publish(self, update: WeightUpdate) -> int:
        try:
            (version,) = await self._gateway.publish(update)
        except (WorkerLost, EngineError) as error:
            raise GatewayLost(f"the gateway's actor cannot be told: {error}") from error
        return int(version)

    async def aclose(self) -> None:
        await super().aclose()
        try:
            await self._gateway.close()
        finally:
            await self._engines.close()
