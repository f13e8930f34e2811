"""The gateway: sessions on the wire, over one engine. Opens, finds, recovers and ends them.

async with Gateway(engine) as gateway:
    session = await gateway.open()
    …                                   # an agent is given session.openai_base_url and session.key
    episode = await session.close()
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError, MissingExtra, StorageError
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Engine, Reasoning
from loopwright.engines.weight_update import WeightUpdate, apply_update
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.served_session import ServedSession
from loopwright.gateway.sessions.session_config import SessionConfig, is_id, new_id
from loopwright.gateway.sessions.store import DiskStore, NoStore, Store
from loopwright.gateway.sessions.template import template_of

if TYPE_CHECKING:
    from loopwright.gateway.server.server import Server


_KEPT_S = 60.0
"""Seconds that a session which has ended stays in memory."""


class AdvertiseError(LoopwrightError, ValueError):
    """An address at which no agent could reach the gateway."""


class GatewayConfig(Config):
    """How a gateway serves."""

    host: str = "127.0.0.1"
    """Where it listens; by default only this machine reaches it."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 for any that is free."""
    advertise: str | None = None
    """The URL that agents are given; needed where the host is all addresses."""
    advertise_host: str | None = None
    """The host name or address that agents are given, with the port at which the gateway listens."""
    model: str = "policy"
    """What `models` lists; requests may name any."""
    template: Literal["auto", "chatml", "llama3", "json"] = "auto"
    """How conversations and tool calls are written; `auto` does as the engine's own setting says."""
    reasoning: Reasoning | None = None
    """What the policy thought before the user last spoke: `preserve` keeps it, `fork` leaves it out; as the engine's
    own setting says where this says nothing."""
    thinks: bool | None = None
    """Whether turns are begun with `<think>`; as the engine's own setting says where this says nothing."""
    ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which a session expires, unless its opener says otherwise."""
    kept_s: float = Field(default=600.0, gt=0)
    """Seconds that a session which was completed can still be read where no store keeps it and no run collects it."""
    body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """The largest request."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """Seconds of silence in a stream before a comment is sent."""
    write_s: float = Field(default=60.0, gt=0)
    """Seconds that a client may take to read what it was sent."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that calls under way have to come to their end, once the gateway is told to end."""
    access_log: str | None = None
    """A file with a line of JSON for every request, `-` for standard output; without keys and what was said."""
    log_prompts: bool = False
    """Whether the access log has what was said, too."""

    def address(self, port: int) -> str:
        """What agents are given; AdvertiseError if that would be no address."""
        if self.advertise is not None:
            parts = urlsplit(self.advertise)
            if parts.scheme not in ("http", "https") or not parts.hostname or _everywhere(parts.hostname):
                raise AdvertiseError(
                    f"advertise: {self.advertise!r} is no URL that an agent can reach, like http://gpu-box:8400."
                )
            return self.advertise.rstrip("/")
        host = self.advertise_host or self.host
        if _everywhere(host):
            raise AdvertiseError(
                f"host: {host} means all addresses, and agents can be given none of them. "
                'Say where they reach the gateway: --advertise http://gpu-box:8400, or advertise_host = "10.0.0.1".'
            )
        if not self.public and not is_loopback(host):
            raise AdvertiseError(
                f"advertise_host: agents would look for the gateway at {host}, but it listens at {self.host} alone. "
                'Have it listen there too: host = "0.0.0.0".'
            )
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def public(self) -> bool:
        """Whether other machines reach it."""
        return not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _everywhere(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session for whoever opened it."""

    served: ServedSession
    address: str

    @property
    def id(self) -> str:
        """Its name, and the first part of its paths."""
        return self.served.id

    @property
    def key(self) -> str:
        """Its secret: the API key that its agent uses."""
        return self.served.key

    @property
    def openai_base_url(self) -> str:
        """For OpenAI's SDKs."""
        return f"{self.address}/{self.id}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's SDKs."""
        return f"{self.address}/{self.id}"

    def episode(self) -> Episode:
        """What was recorded by now."""
        return self.served.episode()

    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End the session; its episode, yet to be judged."""
        return await self.served.close("complete", outcome, reason)

    def as_json(self) -> dict[str, Any]:
        """What its opener is told."""
        return {
            "id": self.id,
            "key": self.key,
            "status": self.served.status,
            "openai_base_url": self.openai_base_url,
            "anthropic_base_url": self.anthropic_base_url,
        }


class Gateway:
    """Serves sessions. With an `output` directory they survive the process; without one they end with it.

    One that `forgets` lets go of sessions a minute after they have ended: whoever opened them has their episodes.
    """

    def __init__(
        self,
        engine: Engine,
        config: GatewayConfig = GatewayConfig(),  # noqa: B008  frozen
        *,
        output: Path | None = None,
        token: str | None = None,
        forgets: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        config.address(config.port)  # before anything starts
        if token == "":
            raise ValueError("the gateway's token is empty, which whoever brings no key would have; say None for none")
        if config.template != "auto" and hasattr(engine, "tokenizer"):
            template_of(config.template, engine.tokenizer)
        self.engine, self.config, self.token, self.clock = engine, config, token, clock
        self._output = output
        self._store: Store = NoStore()
        self._sessions: dict[str, ServedSession] = {}
        self._server: Server | None = None
        self._update_lock = asyncio.Lock()
        self._forgets = forgets or output is not None
        self._recovered = False
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            from loopwright.gateway.server.server import Server
        except ImportError as error:
            raise MissingExtra("the gateway", "gateway") from error
        if self._output is not None:
            self._store = DiskStore(self._output)
        try:
            self._recover_open()
            self._server = Server(self)
            await self._listen(self._server)
        except BaseException:
            self._store.close()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            await self._server.stop()
        await asyncio.gather(*(served.leave() for served in self._sessions.values()))
        self._store.close()

    async def _listen(self, server: "Server") -> None:
        try:
            await server.start()
        except OSError as error:
            where = f"{self.config.host}:{self.config.port}"
            raise AdvertiseError(
                f"cannot listen at {where}: {error.strerror or error}. Choose another port."
            ) from error

    @property
    def address(self) -> str:
        """The URL that agents are given."""
        return self.config.address(self._server.port if self._server else self.config.port)

    async def apply_update(self, update: WeightUpdate) -> int:
        """Apply a weight update to the engine; running calls are held meanwhile, then continue with the new weights."""
        async with self._update_lock:
            return await apply_update(self.engine, update)

    async def update(self, version: int, source: Any = None) -> None:
        """New weights for all engines, from where they can read them. EngineError if no engine could take them."""
        await self.apply_update(WeightUpdate(version, weights=source))

    async def pause(self) -> None:
        """Hold all calls; streams are kept alive."""
        await self.apply_update(WeightUpdate(self.engine.version, paused=True))

    async def resume(self) -> None:
        """Let calls go on."""
        await self.apply_update(WeightUpdate(self.engine.version))

    @property
    def store(self) -> Store:
        """Where its sessions are kept."""
        return self._store

    def counted(self) -> tuple[int, int]:
        """How many sessions are open, and how many calls are under way."""
        all_served = self._sessions.values()
        return sum(served.status == "open" for served in all_served), sum(served.running for served in all_served)

    def knows(self, id: str | None) -> bool:
        """Whether a session of this id is in memory."""
        return id in self._sessions

    # -- sessions -----------------------------------------------------------------------------------------------

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> OpenSession:
        """A new session; with an id that is known, and the same run and trial, the one that there is."""
        config = SessionConfig(ttl_s=self.config.ttl_s) if config is None else config
        if "ttl_s" not in config.model_fields_set:
            config = config.model_copy(update={"ttl_s": self.config.ttl_s})
        if id is None:
            id = new_id()
        elif not is_id(id):
            said = "letters, digits, '.', '_' and '-', and begins with a letter or digit"
            raise Refusal(400, "invalid", f"{id[:80]!r} is no id of a session: it has up to 128 {said}", retry=False)
        try:
            served = self.find(id)
        except Refusal:
            served = self._sessions[id] = self._serve(id, config)
        if (served.config.run, served.config.trial) != (config.run, config.trial):
            raise Refusal(
                409, "closed", f"session {id!r} belongs to another run or trial; choose another id", retry=False
            )
        if served.status != "open":
            raise served.refusal()
        try:
            await served.settled()
        except Exception:
            self._drop(served)
            raise
        return OpenSession(served, self.address)

    def find(self, id: str) -> ServedSession:
        """The session of this id; one that has ended is read again."""
        served = self._sessions.get(id)
        if served is None and is_id(id):
            self._recover("id = ?", (id,))
            served = self._sessions.get(id)
        if served is None:
            raise Refusal.unknown(id)
        return served

    async def delete(self, id: str) -> None:
        """Forget a session and all that was recorded of it."""
        served = self.find(id)
        await served.delete()
        self._drop(served)

    def _drop(self, served: ServedSession) -> None:
        if self._sessions.get(served.id) is served:  # there may be a new one of this id by now
            del self._sessions[served.id]

    def _serve(self, id: str, config: SessionConfig, key: str | None = None) -> ServedSession:
        engine, template = self.engine.for_session(id), self.config.template
        return ServedSession(
            engine,
            self._store,
            self.clock,
            id,
            config,
            key,
            template=None if template == "auto" else template_of(template, engine.tokenizer),
            reasoning=self.config.reasoning,
            thinks=self.config.thinks,
        )

    def _recover_open(self) -> None:
        if not self._recovered and hasattr(self.engine, "tokenizer"):  # a relay learns it from its first worker
            self._recovered = True
            self._recover("status = ?", ("open",))

    def _recover(self, which: str, values: tuple[str, ...]) -> None:
        query = "SELECT id, key, terms, opened_at, status, closed_at, outcome, reason, snapshot FROM sessions WHERE "
        for id, key, config, *row in self._store.rows(query + which, values):
            if id in self._sessions:
                continue
            served = self._serve(id, SessionConfig.model_validate_json(config), key)
            served.restore(tuple(row))
            self._sessions[id] = served

    async def _sweep(self) -> None:
        """End sessions whose time is up, and let go of those that have ended and can be read again."""
        while True:
            await asyncio.sleep(1.0)
            self._recover_open()
            for served in list(self._sessions.values()):
                with suppress(StorageError):  # tried again the next time, and told to whoever asks
                    if served.expires():
                        await served.close("expired", Outcome.EXPIRED, f"no call came for {served.config.ttl_s:g} s")
                    elif served.untold:
                        await served.settled()
                if self._is_over(served):
                    self._drop(served)

    def _is_over(self, served: ServedSession) -> bool:
        """Whether a session need not be in memory: it can be read again, or whoever completed it has its episode."""
        if served.status == "deleted":  # whoever wanted that has left before it was done
            return served.ended_s() > 0
        if self._forgets:
            return served.ended_s() > _KEPT_S
        return served.status == "complete" and served.ended_s() > self.config.kept_s
