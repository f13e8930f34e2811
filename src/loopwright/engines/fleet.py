"""Several engines as one: a session stays with one member; if that fails, another continues the stream."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from loopwright.core.errors import Problem
from loopwright.core.registry import config_parser
from loopwright.engines.base import (
    GUIDES,
    PENALTIES,
    Chunk,
    ContextFull,
    Engine,
    EngineAway,
    EngineConfig,
    EngineError,
    Sampling,
    engines,
)
from loopwright.engines.fleet_member import FleetMember
from loopwright.engines.http.base import HttpConfig
from loopwright.engines.http.client import EngineGone
from loopwright.engines.tokenizer import Tokenizer, fingerprint

log = logging.getLogger(__name__)
_PAUSE_S = 60.0
_UNKNOWN_VERSION = -1
"""The version of an engine that joined late: what it calls version 0 may be any weights."""
_AnyEngine = Annotated[SerializeAsAny[EngineConfig], BeforeValidator(config_parser(engines))]
_Operation = Callable[[Engine], Awaitable[None]]


class FleetSettings(EngineConfig):
    """How several engines are supervised."""

    wait_s: float = Field(default=60.0, ge=0)
    """Seconds that a request waits while no engine can serve it."""
    check_s: float = Field(default=5.0, gt=0)
    """Seconds between health checks, and the time limit of one; after two failures in a row, streams are moved."""
    rest_s: float = Field(default=1.0, gt=0)
    """Seconds that an engine is not used after a failure; doubled after each further one, a minute at most."""
    tries: int = Field(default=3, ge=1)
    """Failures in a row, without a token in between, after which a request fails."""
    spread: float = Field(default=1.25, ge=1)
    """A session leaves its engine while that runs more than this multiple of the average number of streams."""
    update_s: float = Field(default=600.0, gt=0)
    """Time limit for an engine to load weights."""


class FleetConfig(FleetSettings):
    """Several engines that serve as one."""

    type: Literal["fleet"] = "fleet"
    engines: tuple[_AnyEngine, ...] = Field(min_length=1)
    """The engines, each selected by its `type`; all of the same model."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        return [
            Problem(f"engines[{index}].{problem.key}", problem.message)
            for index, each in enumerate(self.engines)
            for problem in each.problems(scenario_dir)
        ]

    @property
    def takes_weights(self) -> bool:
        return all(each.takes_weights for each in self.engines)

    @property
    def policy(self) -> str | None:
        return self.engines[0].policy


class Fleet(Engine):
    """Serves a stream from one of several engines.

    Rendezvous hashing routes each session to one engine, unless that is too busy: an engine that joins or leaves moves
    only its own sessions. Only engines at the fleet's version serve. A stream that moves therefore continues with the
    same weights, or with newer ones after an update, but never with older ones.
    """

    Config: ClassVar[type[EngineConfig]] = FleetConfig
    config: FleetSettings

    def __init__(self, config: FleetSettings, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        self._members: dict[str, FleetMember] = {}
        self._max_context: int | None = None
        self._changed = asyncio.Event()
        self._update: tuple[Any, int] | None = None
        self._update_lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        if isinstance(config, FleetConfig):
            for each in config.engines:
                if isinstance(each, HttpConfig):  # fail at once if its server is gone: another engine may serve
                    each = each.model_copy(update={"wait_s": 0.0})
                # By type and address, so that a name does not depend on the other members.
                address = getattr(each, "url", None) or getattr(each, "model", None)
                name = each.type if address is None else f"{each.type}:{address}"
                count = sum(member.partition("#")[0] == name for member in self._members)
                self.add(f"{name}#{count + 1}" if count else name, engines.get(each.type)(each, scenario_dir))

    # -- members ------------------------------------------------------------------------------------------------

    def add(self, name: str, engine: Engine) -> FleetMember:
        """Add an engine. Raises EngineError if its tokenizer differs from that of the others."""
        if not self._members and not hasattr(self, "tokenizer"):
            self.tokenizer: Tokenizer = engine.tokenizer
        elif engine.tokenizer is not self.tokenizer and fingerprint(engine.tokenizer) != fingerprint(self.tokenizer):
            raise EngineError(f"engine {name}: its tokenizer differs from the other engines'; serve it separately")
        return self._join(name, engine)

    def _join(self, name: str, engine: Engine) -> FleetMember:
        member = self._members[name] = FleetMember(name, engine)
        if self._update is None and engine.version > self.version:
            # It was updated before this fleet started.
            self.version = engine.version
        elif self._update is not None and engine.version == 0:
            engine.version = _UNKNOWN_VERSION
        self._wake()
        return member

    def _leave(self, member: FleetMember, reason: str) -> None:
        """Remove it; other members continue its streams."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
        member.leaving, member.reason = True, reason
        member.release()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _best(self, key: str | None, now: float) -> FleetMember | None:
        ready = [
            member
            for member in self._members.values()
            if not member.leaving and member.rests_until <= now and member.engine.version == self.version
        ]
        if key is None or len(ready) < 2:
            return min(ready, key=lambda member: member.running, default=None)
        most = math.ceil(self.config.spread * (sum(member.running for member in ready) + 1) / len(ready))
        return max((m for m in ready if m.running < most), key=lambda member: member.weight(key))

    async def _choose(self, key: str | None) -> FleetMember:
        """The member that serves a stream; waits while the fleet is paused or no member is available."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        clock, waited = asyncio.get_running_loop().time, 0.0
        while True:
            await self.wait_until_running()
            now = clock()
            if (member := self._best(key, now)) is not None:
                return member
            if waited >= self.config.wait_s:
                raise EngineError(f"no engine could serve for {self.config.wait_s:g} s: {self._unavailable()}")
            rests = [m.rests_until - now for m in self._members.values() if m.rests_until > now]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min([self.config.wait_s - waited, *rests]) + 0.001)
            waited += clock() - now

    def _unavailable(self) -> str:
        """Why no member can serve."""
        return "; ".join(f"{each['name']} is {each['state']}" for each in self.describe()) or "the fleet is empty"

    def describe(self) -> list[dict[str, Any]]:
        """Each member: its name, version, number of running streams, and state."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "name": member.name,
                "version": member.engine.version,
                "running": member.running,
                "state": self._state(member, now),
            }
            for member in self._members.values()
        ]

    def _state(self, member: FleetMember, now: float) -> str:
        reason = f" ({member.reason})" if member.reason else ""
        if member.leaving:
            return "leaving"
        if member.engine.version != self.version:
            return f"excluded: it has version {member.engine.version}, not {self.version}{reason}"
        return f"backing off{reason}" if member.rests_until > now else "serving"

    @property
    def max_context(self) -> int | None:
        """The shortest that is known of its members: any of them may serve the next turn."""
        lengths = (member.engine.max_context for member in self._members.values())
        return min((length for length in (self._max_context, *lengths) if length is not None), default=None)

    @max_context.setter
    def max_context(self, length: int | None) -> None:
        self._max_context = length

    # -- streams ------------------------------------------------------------------------------------------------

    @property
    def steering(self) -> frozenset[str]:
        """What all members apply; without members, everything: the one that joins will refuse what it cannot do."""
        return frozenset.intersection(*(m.engine.steering for m in self._members.values()), PENALTIES | GUIDES)

    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        return self.route(None, ids, sampling, seed)

    def for_session(self, key: str) -> Engine:
        return _SessionView(self, key)

    async def route(
        self, key: str | None, ids: Sequence[int], sampling: Sampling, seed: str
    ) -> AsyncGenerator[Chunk, None]:
        """A session's stream. If a member fails, the next one continues after the tokens that were already sampled."""
        sampled: list[int] = []
        clock = asyncio.get_running_loop().time
        failures, since = 0, clock()
        while True:
            member = await self._choose(key)
            before, rest = len(sampled), sampling
            if sampled:
                rest = sampling.after(before)
            try:
                async with aclosing(member.stream([*ids, *sampled] if sampled else ids, rest, seed)) as stream:
                    async for chunk in stream:
                        sampled += chunk.ids
                        yield chunk
                        if chunk.finish is not None:
                            member.mark_healthy()
                            return
                raise EngineError("it ended a stream without a finish reason")
            except ContextFull:
                if not sampled:
                    raise
            except ValueError:  # the request is at fault
                raise
            except OSError as error:  # EngineError is one
                if len(sampled) > before:
                    failures, since = 0, clock()
                # An absent engine has not failed the request: it has until wait_s to come back.
                absent = isinstance(error, EngineAway | EngineGone) and clock() - since < self.config.wait_s
                failures += not absent
                self._failed(member, error)
                if failures >= self.config.tries:
                    raise
                if len(sampled) < sampling.max_tokens:
                    continue
            yield Chunk((), (), member.engine.version, "length")  # the token limit was reached
            return

    def _failed(self, member: FleetMember, error: Exception, reason: str = "") -> None:
        reason = reason or str(error) or type(error).__name__
        log.warning("engine %s failed and is not used for a while: %s", member.name, reason)
        now, away = asyncio.get_running_loop().time(), isinstance(error, EngineAway)
        member.back_off(reason, now, self.config.rest_s, away=away)

    # -- health -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        missed: dict[FleetMember, int] = {}
        while True:
            await asyncio.sleep(self.config.check_s)
            members = list(self._members.values())
            missed = {member: missed.get(member, 0) for member in members}
            for member, healthy in zip(members, await asyncio.gather(*map(self._is_healthy, members)), strict=True):
                missed[member] = 0 if healthy else missed[member] + 1
                if missed[member] >= 2:
                    member.release()
            await asyncio.gather(*map(self._catch_up, members))

    async def check(self) -> None:
        """EngineError if it has members, and none of them could serve."""
        checks = [asyncio.ensure_future(_failure(member)) for member in self._members.values()]
        failures = []
        try:
            for check in asyncio.as_completed(checks):
                if not (failure := await check):
                    return
                failures.append(failure)
        finally:
            for each in checks:
                each.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        if failures:
            raise EngineError("; ".join(failures))

    async def _is_healthy(self, member: FleetMember) -> bool:
        try:
            async with asyncio.timeout(self.config.check_s):
                await member.engine.check()
        except OSError as error:
            reason = f"its health check failed: {error}" if str(error) else "its health check timed out"
            self._failed(member, error, reason)
            return False
        return True

    # -- weights ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await super().pause()
        await self._each(lambda engine: engine.pause(), _PAUSE_S)

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume(), _PAUSE_S)
        await super().resume()

    async def load_weights(self, source: Any, version: int) -> None:
        """Load them into all members; one that fails is excluded until it catches up. EngineError if all fail."""
        async with self._update_lock:
            failed = await self._each(lambda engine: engine.load_weights(source, version), self.config.update_s)
            if failed and len(failed) == len(self._members):
                raise EngineError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
            self.version, self._update = version, (source, version)
            for name in failed:
                self._members[name].release()
            self._wake()

    async def _each(self, do: _Operation, within_s: float) -> dict[str, str]:
        """Apply an operation to every member; returns the reasons of those that failed, by name."""
        members = list(self._members.values())
        reasons = await asyncio.gather(*(self._try(member, do, within_s) for member in members))
        return {
            member.name: reason
            for member, reason in zip(members, reasons, strict=True)
            if reason is not None and self._members.get(member.name) is member
        }

    async def _try(self, member: FleetMember, do: _Operation, within_s: float) -> str | None:
        try:
            async with asyncio.timeout(within_s):
                await do(member.engine)
        except (OSError, ValueError) as error:
            reason = str(error) or f"it took longer than {within_s:g} s"
            self._failed(member, error, reason)
            return reason
        return None

    async def _catch_up(self, member: FleetMember) -> None:
        """Load the current weights into a member that missed the last update."""
        if self._update is None or member.engine.version == self.version or member.leaving:
            return
        async with self._update_lock:
            source, version = self._update
            if member.rests_until > asyncio.get_running_loop().time() or member.engine.version == version:
                return

            async def load(engine: Engine) -> None:
                await engine.pause()
                try:
                    await engine.load_weights(source, version)
                finally:
                    await engine.resume()

            if await self._try(member, load, self.config.update_s) is None:
                log.info("engine %s has caught up with version %d", member.name, version)
                member.mark_healthy()
                self._wake()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))


class _SessionView(Engine):
    """A fleet as one session sees it."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        super().__init__(fleet.config, fleet.scenario_dir)
        self._fleet, self._key = fleet, key
        self.tokenizer, self.activity = fleet.tokenizer, fleet.activity

    @property
    def version(self) -> int:
        return self._fleet.version

    @version.setter
    def version(self, _: int) -> None: ...  # only the fleet sets it

    @property
    def steering(self) -> frozenset[str]:
        return self._fleet.steering

    @property
    def max_context(self) -> int | None:
        return self._fleet.max_context

    @max_context.setter
    def max_context(self, length: int | None) -> None:
        self._fleet.max_context = length

    @property
    def is_paused(self) -> bool:
        return self._fleet.is_paused

    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        return self._fleet.route(self._key, ids, sampling, seed)

    async def pause(self) -> None:
        await self._fleet.pause()

    async def resume(self) -> None:
        await self._fleet.resume()


async def _failure(member: FleetMember) -> str:
    """Why it cannot serve now; empty if it can."""
    try:
        await member.engine.check()
    except OSError as error:
        return f"{member.name}: {error}"
    return ""
