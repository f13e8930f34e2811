"""Several engines as one: a session keeps to one of them, and what one drops another goes on with, token by token."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from loopwright.core.errors import Problem
from loopwright.core.tagged_config import config_parser
from loopwright.engines.base import (
    Chunk,
    ContextFull,
    Engine,
    EngineAway,
    EngineConfig,
    EngineError,
    Sampling,
    engines,
)
from loopwright.engines.fingerprint import fingerprint
from loopwright.engines.fleet_member import FleetMember
from loopwright.engines.http.base import HttpConfig
from loopwright.engines.http.client import EngineGone
from loopwright.engines.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_PAUSE_S = 60.0
_UNTOLD = -1
"""The version of an engine that has been told nothing: what it calls version 0 may be any weights."""
_AnyEngine = Annotated[SerializeAsAny[EngineConfig], BeforeValidator(config_parser(engines))]
_Work = Callable[[Engine], Awaitable[None]]


class FleetSettings(EngineConfig):
    """How several engines are kept."""

    wait_s: float = Field(default=60.0, ge=0)
    """Seconds that a request waits for an engine while there is none that could serve it."""
    check_s: float = Field(default=5.0, gt=0)
    """Seconds between health checks, and how long one may take; after two in a row that fail, streams are moved."""
    rest_s: float = Field(default=1.0, gt=0)
    """Seconds that an engine is left alone after it failed; twice as long each time, a minute at most."""
    tries: int = Field(default=3, ge=1)
    """Engines that may fail a request in a row, without a token in between, before it fails."""
    spread: float = Field(default=1.25, ge=1)
    """A session leaves its engine while that has so many times the average of running streams."""
    update_s: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to load weights."""


class FleetConfig(FleetSettings):
    """Several engines that serve as one."""

    type: Literal["fleet"] = "fleet"
    engines: tuple[_AnyEngine, ...] = Field(min_length=1)
    """The engines, each chosen by its `type`; all of the same model."""

    def problems(self, home: Path) -> list[Problem]:
        return [
            Problem(f"engines[{index}].{problem.key}", problem.message)
            for index, each in enumerate(self.engines)
            for problem in each.problems(home)
        ]

    @property
    def takes_weights(self) -> bool:
        return all(each.takes_weights for each in self.engines)

    @property
    def policy(self) -> str | None:
        return self.engines[0].policy


class Fleet(Engine):
    """Serves a stream from one of several engines.

    A session goes to the engine that wants it most (rendezvous hashing), unless that is too busy: an engine that joins
    or leaves moves only the sessions that it gets or had. Only engines at the fleet's own version serve, so that what
    is begun elsewhere goes on under the same weights, or under newer ones after an update, but never under older ones.
    """

    Config: ClassVar[type[EngineConfig]] = FleetConfig
    config: FleetSettings

    def __init__(self, config: FleetSettings, home: Path) -> None:
        super().__init__(config, home)
        self._members: dict[str, FleetMember] = {}
        self._open, self._news = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._update: tuple[Any, int] | None = None
        self._updating = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        if isinstance(config, FleetConfig):
            for each in config.engines:
                made = engines.get(each.type)(_impatient(each), home)
                self._put(_free_name(each, self._members), made)

    # -- who serves ---------------------------------------------------------------------------------------------

    def _put(self, name: str, engine: Engine) -> FleetMember:
        """Take in an engine. EngineError if its tokens are not those of the others."""
        if not self._members and not hasattr(self, "tokenizer"):
            self.tokenizer: Tokenizer = engine.tokenizer
        elif engine.tokenizer is not self.tokenizer and fingerprint(engine.tokenizer) != fingerprint(self.tokenizer):
            raise EngineError(f"engine {name}: its tokenizer is not the one that the others have; serve it apart")
        return self._join(name, engine)

    def _join(self, name: str, engine: Engine) -> FleetMember:
        member = self._members[name] = FleetMember(name, engine)
        if self._update is None and engine.version > self.version:
            # Whoever comes with more than we know of has been updated before we began.
            self.version = engine.version
        elif self._update is not None and engine.version == 0:
            engine.version = _UNTOLD
        self._wake()
        return member

    def _leave(self, member: FleetMember, reason: str) -> None:
        """Do without it from now on; others go on with what it has begun."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
        member.leaving, member.reason = True, reason
        member.release()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

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

    async def _placed(self, key: str | None) -> FleetMember:
        """The engine for a stream. While the fleet is paused, or there is none, whoever asks waits."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        clock, waited = asyncio.get_running_loop().time, 0.0
        while True:
            await self._open.wait()
            now = clock()
            if (member := self._best(key, now)) is not None:
                return member
            if waited >= self.config.wait_s:
                raise EngineError(f"no engine could serve for {self.config.wait_s:g} s: {self._why()}")
            rests = [m.rests_until - now for m in self._members.values() if m.rests_until > now]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min([self.config.wait_s - waited, *rests]) + 0.001)
            waited += clock() - now

    def _why(self) -> str:
        return "; ".join(f"{each['name']} is {each['state']}" for each in self.described()) or "none is there"

    def described(self) -> list[dict[str, Any]]:
        """Each engine: its name, its version, how many streams it serves, and how it is."""
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
        because = f" ({member.reason})" if member.reason else ""
        if member.leaving:
            return "leaving"
        if member.engine.version != self.version:
            return f"left out: it has version {member.engine.version}, not {self.version}{because}"
        return f"left alone for a while{because}" if member.rests_until > now else "serving"

    # -- streams ------------------------------------------------------------------------------------------------

    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        return self.routed(None, ids, sampling, seed)

    def for_session(self, key: str) -> Engine:
        return _Seat(self, key)

    async def routed(
        self, key: str | None, ids: Sequence[int], sampling: Sampling, seed: str
    ) -> AsyncGenerator[Chunk, None]:
        """A stream of a session's. What an engine has given before it failed is what the next one goes on from."""
        said: list[int] = []
        clock = asyncio.get_running_loop().time
        failures, since = 0, clock()
        while True:
            member = await self._placed(key)
            begun, rest = len(said), sampling
            if said:
                rest = sampling.model_copy(update={"max_tokens": sampling.max_tokens - begun})
            try:
                async with aclosing(member.stream([*ids, *said] if said else ids, rest, seed)) as stream:
                    async for chunk in stream:
                        said += chunk.ids
                        yield chunk
                        if chunk.finish is not None:
                            member.served()
                            return
                raise EngineError("it ended a stream without saying why")
            except ContextFull:
                if not said:
                    raise
            except ValueError:  # the request's own fault
                raise
            except OSError as error:  # EngineError is one
                if len(said) > begun:
                    failures, since = 0, clock()
                # One that is not there has not failed the request; there is time for it to come back.
                absent = isinstance(error, EngineAway | EngineGone) and clock() - since < self.config.wait_s
                failures += not absent
                self._failed(member, error)
                if failures >= self.config.tries:
                    raise
                if len(said) < sampling.max_tokens:
                    continue
            yield Chunk((), (), member.engine.version, "length")  # nothing is left to say
            return

    def _failed(self, member: FleetMember, error: Exception, reason: str = "") -> None:
        reason = reason or str(error) or type(error).__name__
        log.warning("engine %s failed and is left alone for a while: %s", member.name, reason)
        now, away = asyncio.get_running_loop().time(), isinstance(error, EngineAway)
        member.rest(reason, now, self.config.rest_s, away=away)

    # -- health -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        missed: dict[FleetMember, int] = {}
        while True:
            await asyncio.sleep(self.config.check_s)
            members = list(self._members.values())
            missed = {member: missed.get(member, 0) for member in members}
            for member, well in zip(members, await asyncio.gather(*map(self._is_well, members)), strict=True):
                missed[member] = 0 if well else missed[member] + 1
                if missed[member] >= 2:
                    member.release()
            await asyncio.gather(*map(self._catch_up, members))

    async def check(self) -> None:
        """EngineError if it has engines, and none of them could serve."""
        checks = [asyncio.ensure_future(_illness(member)) for member in self._members.values()]
        ills = []
        try:
            for check in asyncio.as_completed(checks):
                if not (ill := await check):
                    return
                ills.append(ill)
        finally:
            for each in checks:
                each.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        if ills:
            raise EngineError("; ".join(ills))

    async def _is_well(self, member: FleetMember) -> bool:
        try:
            async with asyncio.timeout(self.config.check_s):
                await member.engine.check()
        except OSError as error:
            said = f"its health check failed: {error}" if str(error) else "its health check took too long"
            self._failed(member, error, said)
            return False
        return True

    # -- weights ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._open.clear()
        await self._each(lambda engine: engine.pause(), _PAUSE_S)

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume(), _PAUSE_S)
        self._open.set()

    async def load_weights(self, source: Any, version: int) -> None:
        """All engines take them; one that cannot is left out until it can. EngineError if none can."""
        async with self._updating:
            failed = await self._each(lambda engine: engine.load_weights(source, version), self.config.update_s)
            if failed and len(failed) == len(self._members):
                raise EngineError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
            self.version, self._update = version, (source, version)
            for name in failed:
                self._members[name].release()
            self._wake()

    async def _each(self, do: _Work, within_s: float) -> dict[str, str]:
        """Have every engine do it; why it could not, by name, for those that could not."""
        members = list(self._members.values())
        reasons = await asyncio.gather(*(self._tried(member, do, within_s) for member in members))
        return {
            member.name: reason
            for member, reason in zip(members, reasons, strict=True)
            if reason is not None and self._members.get(member.name) is member
        }

    async def _tried(self, member: FleetMember, do: _Work, within_s: float) -> str | None:
        try:
            async with asyncio.timeout(within_s):
                await do(member.engine)
        except (OSError, ValueError) as error:
            reason = str(error) or f"it took longer than {within_s:g} s"
            self._failed(member, error, reason)
            return reason
        return None

    async def _catch_up(self, member: FleetMember) -> None:
        """Give an engine that missed the last update its weights."""
        if self._update is None or member.engine.version == self.version or member.leaving:
            return
        async with self._updating:
            source, version = self._update
            if member.rests_until > asyncio.get_running_loop().time() or member.engine.version == version:
                return

            async def load(engine: Engine) -> None:
                await engine.pause()
                try:
                    await engine.load_weights(source, version)
                finally:
                    await engine.resume()

            if await self._tried(member, load, self.config.update_s) is None:
                log.info("engine %s has caught up with version %d", member.name, version)
                member.served()
                self._wake()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))


class _Seat(Engine):
    """A fleet as one session sees it."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        super().__init__(fleet.config, fleet.home)
        self._fleet, self._key = fleet, key
        self.tokenizer = fleet.tokenizer

    @property
    def version(self) -> int:
        return self._fleet.version

    @version.setter
    def version(self, _: int) -> None: ...  # the fleet's alone

    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        return self._fleet.routed(self._key, ids, sampling, seed)

    async def pause(self) -> None:
        await self._fleet.pause()

    async def resume(self) -> None:
        await self._fleet.resume()


async def _illness(member: FleetMember) -> str:
    """Why it could not serve now; nothing if it could."""
    try:
        await member.engine.check()
    except OSError as error:
        return f"{member.name}: {error}"
    return ""


def _impatient(config: EngineConfig) -> EngineConfig:
    """An engine that fails at once where its server is gone: another one may serve meanwhile."""
    return config.model_copy(update={"wait_s": 0.0}) if isinstance(config, HttpConfig) else config


def _free_name(config: EngineConfig, taken: dict[str, FleetMember]) -> str:
    """What it is and where; it stays the same whatever other engines there are."""
    place = getattr(config, "url", None) or getattr(config, "model", None)
    name = config.type if place is None else f"{config.type}:{place}"
    count = sum(each.partition("#")[0] == name for each in taken)
    return name if not count else f"{name}#{count + 1}"
