"""Engines in separate Ray actors, shared by all loop workers or gateways of a run."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from loopwright.engines.base import Chunk, Engine, EngineAway, EngineConfig, EngineError, Sampling, engines
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.tokenizer import Tokenizer
from loopwright.engines.weight_update import WeightUpdate, apply_update
from loopwright.rollouts.loops.base import LoopConfig, agent_loop
from loopwright.rollouts.loops.worker import LoopWorker
from loopwright.rollouts.pools.actor_host import build_below
from loopwright.rollouts.pools.base import Pool, StreamingWorker
from loopwright.rollouts.pools.ray.actor import first_line
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.pools.resources import ResourceRequest
from loopwright.rollouts.pools.serialization import pack, unpack, unpack_exception

START_S = 300.0
"""Seconds that an engine may take to load."""


@dataclass(frozen=True)
class EngineFacts:
    """What those who use an engine must know about it."""

    tokenizer: Tokenizer
    version: int
    steering: frozenset[str]
    max_context: int | None


class EngineWorker(StreamingWorker):
    """An engine in an actor. Its pool loads new weights; everybody else only samples."""

    def __init__(self, config: EngineConfig, scenario_dir: Path) -> None:
        self._engine = engines.get(config.type)(config, scenario_dir)

    async def handle(self, request: str) -> int:
        """The version of its weights; EngineError if it cannot serve."""
        await self._engine.check()
        return self._engine.version

    async def stream(self, request: tuple[Sequence[int], Sampling, str]) -> AsyncGenerator[Chunk, None]:
        ids, sampling, seed = request
        async for chunk in self._engine.generate(ids, sampling, seed=seed):
            yield chunk

    async def apply_update(self, update: WeightUpdate) -> int:
        return await apply_update(self._engine, update)

    def describe(self) -> EngineFacts:
        engine = self._engine
        return EngineFacts(engine.tokenizer, engine.version, engine.steering, engine.max_context)

    async def close(self) -> None:
        await self._engine.close()


class ActorEngine(Engine):
    """The engine in the actor of this name; the replacement of a dead actor has the same name.

    Others use the same engine, so it is neither paused nor updated from here: an update only asks for its version.
    """

    def __init__(self, name: str, facts: EngineFacts) -> None:
        super().__init__(EngineConfig(type="named"), Path())
        self.name, self.tokenizer, self.version = name, facts.tokenizer, facts.version
        self._steering, self.max_context = facts.steering, facts.max_context
        self._handle: Any = None

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

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, source: Any, version: int) -> None:
        await self.check()
        if self.version != version:
            raise EngineAway(f"{self.name} has version {self.version} of the weights, not {version}")

    async def check(self) -> None:
        actor = await self._actor()
        try:
            failure, answer = unpack(await actor.handle.remote(pack((0, None, None, "version"))))
        except RayError as error:
            self._handle = None
            raise EngineError(f"{self.name}: {first_line(error)}") from error
        if failure is not None:
            raise _as_engine_error(unpack_exception(failure, self.name))
        self.version = answer


def _as_engine_error(error: BaseException) -> BaseException:
    """An exception of a remote engine: a ValueError is the request's fault, anything else is the engine's."""
    return error if isinstance(error, EngineError | ValueError) else EngineError(f"{type(error).__name__}: {error}")


class EngineClient:
    """How other actors reach the engines of a pool. It can be sent to them once the pool has started."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.facts: EngineFacts | None = None

    def connect(self) -> Engine:
        """The engines as one engine, in the process that samples."""
        if self.facts is None:
            raise RuntimeError("the engines are not started")
        fleet = Fleet(FleetSettings(type="fleet"), Path())
        for name in self._names:
            fleet.add(name, ActorEngine(name, self.facts))
        return fleet


class EnginePool:
    """Engines in actors: starts them, gives them new weights, and replaces the dead, which get the latest weights."""

    def __init__(
        self,
        build: Callable[..., EngineWorker],
        name: str,
        *,
        request: ResourceRequest,
        import_dir: Path,
        wait_s: float,
    ) -> None:
        prefix = f"loopwright-{name}-{secrets.token_hex(4)}-engine"
        self.pool = RayPool(
            partial(build_below, build, import_dir),
            request=request,
            import_dir=import_dir,
            wait_s=wait_s,
            actor_name=prefix,
            start_timeout_s=START_S,
        )
        self.client = EngineClient([f"{prefix}-{index}" for index in range(request.workers)])

    async def start(self) -> None:
        await self.pool.start()
        self.client.facts = self.pool.description

    async def publish(self, update: WeightUpdate) -> int:
        """Load new weights into all engines; the version that all of them have then."""
        return int(min(await self.pool.publish(update)))

    async def close(self) -> None:
        await self.pool.close()


class SharedEngineLoops(Pool):
    """Loop workers and the engines that they share; both start and stop together."""

    def __init__(self, engines: EnginePool, workers: Pool) -> None:
        self._engines, self._workers = engines, workers

    async def start(self) -> None:
        await self._engines.start()
        await self._workers.start()

    async def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        return await self._workers.call(request, timeout_s=timeout_s)

    async def publish(self, update: WeightUpdate, *, timeout_s: float | None = None) -> list[Any]:
        await self._engines.publish(update)
        return await self._workers.publish(update, timeout_s=timeout_s)

    @property
    def in_flight(self) -> int:
        return self._workers.in_flight

    async def close(self) -> None:
        try:
            await self._workers.close()
        finally:
            await self._engines.close()


def build_loop_worker(loops: Mapping[str, LoopConfig], client: EngineClient, scenario_dir: Path) -> LoopWorker:
    """A worker with these loops that samples from shared engines."""
    return LoopWorker({name: agent_loop(loop, scenario_dir) for name, loop in loops.items()}, client.connect())
