"""The gateway: serves sessions over HTTP with one engine. It opens, finds, recovers and closes them.

async with Gateway(engine) as gateway:
    session = await gateway.open()
    …                                   # an agent gets session.openai_base_url and session.key
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
from loopwright.gateway.sessions.model_template import template_of
from loopwright.gateway.sessions.served_session import ServedSession
from loopwright.gateway.sessions.session_config import SessionConfig, is_id, new_id
from loopwright.gateway.sessions.store import DiskStore
from loopwright.gateway.settings import is_loopback

if TYPE_CHECKING:
    from loopwright.gateway.server.server import Server


_IN_MEMORY_S = 60.0
"""Seconds that a session stays in memory after it has ended."""


class AdvertiseError(LoopwrightError, ValueError):
    """Agents could not reach the gateway at this address."""


class GatewayConfig(Config):
    """How a gateway serves."""

    host: str = "127.0.0.1"
    """The address to listen at; by default only this machine can connect."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 for any free port."""
    advertise: str | None = None
    """The URL for agents; required if `host` means all addresses."""
    advertise_host: str | None = None
    """The host name or address for agents, with the port at which the gateway listens."""
    model: str = "policy"
    """The name that `models` lists; requests may use any name."""
    template: Literal["auto", "chatml", "llama3", "json"] = "auto"
    """The chat template for conversations and tool calls; `auto` uses the engine's setting."""
    reasoning: Reasoning | None = None
    """Reasoning from before the last user message: `preserve` keeps it in the prompt, `fork` removes it. By default the
    engine's setting."""
    thinks: bool | None = None
    """Whether turns start with `<think>`. By default the engine's setting."""
    ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which a session expires, unless the session's own `ttl_s` says otherwise."""
    kept_s: float = Field(default=600.0, gt=0)
    """Seconds for which a completed session can still be read, without a store and a run that collects it."""
    body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """The largest request body."""
    session_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens that a session may record, given and sampled: they are in memory, 50 bytes each."""
    unauthenticated_connections: int = Field(default=256, ge=1)
    """Connections that have not shown a valid key yet, and those of one session, at most a quarter of the files that
    the process may open: a further one replaces the oldest."""
    header_s: float = Field(default=10.0, gt=0)
    """Seconds in which the first request of a connection has to arrive, without its body."""
    read_s: float = Field(default=60.0, gt=0)
    """Seconds in which the body of a request has to arrive."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """Seconds of silence in a stream before a comment is sent."""
    write_s: float = Field(default=60.0, gt=0)
    """Seconds that a client may take to read what was sent."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that running calls have to end when the gateway stops."""
    access_log: str | None = None
    """A file for one line of JSON per request, `-` for standard output; without keys and messages."""
    log_prompts: bool = False
    """Whether the access log contains messages, too."""

    def address(self, port: int) -> str:
        """The URL for agents. AdvertiseError if they could not reach it."""
        if self.advertise is not None:
            parts = urlsplit(self.advertise)
            if parts.scheme not in ("http", "https") or not parts.hostname or _is_unspecified(parts.hostname):
                raise AdvertiseError(
                    f"advertise: {self.advertise!r} is not a URL that agents can reach, such as http://gpu-box:8400."
                )
            return self.advertise.rstrip("/")
        host = self.advertise_host or self.host
        if _is_unspecified(host):
            raise AdvertiseError(
                f"host: {host} means all addresses, which agents cannot connect to. "
                'Set the address for agents: --advertise http://gpu-box:8400, or advertise_host = "10.0.0.1".'
            )
        if not self.public and not is_loopback(host):
            raise AdvertiseError(
                f"advertise_host: agents would connect to {host}, but the gateway listens only at {self.host}. "
                'Let it listen at all addresses: host = "0.0.0.0".'
            )
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def public(self) -> bool:
        """Whether other machines can connect."""
        return not is_loopback(self.host)


def _is_unspecified(host: str) -> bool:
    """Whether it means all addresses."""
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session at a gateway in this process, for its owner."""

    served: ServedSession
    address: str

    @property
    def id(self) -> str:
        """Its id, and the first part of its paths."""
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
        """What was recorded so far."""
        return self.served.episode()

    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End the session; returns its episode, without a reward."""
        return await self.served.close("complete", outcome, reason)

    def as_json(self) -> dict[str, Any]:
        """The response to the client that opened it."""
        return {
            "id": self.id,
            "key": self.key,
            "status": self.served.status,
            "openai_base_url": self.openai_base_url,
            "anthropic_base_url": self.anthropic_base_url,
        }


class Gateway:
    """Serves sessions. With an `output` directory they survive the process; without one they end with it.

    With `forgets`, sessions are released a minute after they have ended: their owner has collected the episodes.
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
        self.address = config.address(config.port)  # before anything starts
        """The URL for agents, with the real port once it is served."""
        if token == "":
            raise ValueError(
                "the gateway's token is empty, which matches requests without a key; use None for no token"
            )
        if config.template != "auto" and hasattr(engine, "tokenizer"):
            template_of(config.template, engine.tokenizer)
        self.engine, self.config, self.token, self.clock = engine, config, token, clock
        self._output = output
        self.store: DiskStore | None = None
        """Where sessions are stored, if they are."""
        self.sessions: dict[str, ServedSession] = {}
        """The sessions in memory, by id."""
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
            self.store = DiskStore(self._output)
        try:
            self._recover_open()
            self._server = Server(self)
            try:
                await self._server.start()
                self.address = self.config.address(self._server.port)
            except OSError as error:
                where = f"{self.config.host}:{self.config.port}"
                raise AdvertiseError(
                    f"cannot listen at {where}: {error.strerror or error}. Choose another port."
                ) from error
        except BaseException:
            if self.store is not None:
                self.store.close()
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
        await asyncio.gather(*(session.detach() for session in self.sessions.values()))
        if self.store is not None:
            self.store.close()

    async def apply_update(self, update: WeightUpdate) -> int:
        """Apply a weight update to the engine; running calls are held meanwhile, then continue with the new weights."""
        async with self._update_lock:
            return await apply_update(self.engine, update)

    async def update(self, version: int, source: Any = None) -> None:
        """Load new weights into all engines, from a path that they can read. EngineError if none of them can."""
        await self.apply_update(WeightUpdate(version, weights=source))

    async def pause(self) -> None:
        """Pause all calls; streams are kept alive."""
        await self.apply_update(WeightUpdate(self.engine.version, paused=True))

    async def resume(self) -> None:
        """Continue all calls."""
        await self.apply_update(WeightUpdate(self.engine.version))

    def count(self) -> tuple[int, int]:
        """How many sessions are open, and how many calls are running."""
        sessions = self.sessions.values()
        return sum(session.status == "open" for session in sessions), sum(session.running for session in sessions)

    # -- sessions -----------------------------------------------------------------------------------------------

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> OpenSession:
        """Open a session. If the id exists, with the same run and trial, it is that session again."""
        config = config or SessionConfig()
        if "ttl_s" not in config.model_fields_set:
            config = config.model_copy(update={"ttl_s": self.config.ttl_s})
        if id is None:
            id = new_id()
        elif not is_id(id):
            rule = "up to 128 letters, digits, '.', '_' and '-', and starts with a letter or digit"
            raise Refusal(400, "invalid", f"{id[:80]!r} is not a session id: it has {rule}", retry=False)

        def check(session: ServedSession) -> None:
            if not session.belongs_to(config):
                reason = "belongs to another run or trial; choose another id"
                raise Refusal(409, "closed", f"session {id!r} {reason}", retry=False)
            if session.status != "open":
                raise session.refusal()

        if id not in self.sessions:
            self._recover("id = ?", (id,), check)
        session = self.sessions.get(id)
        if session is None:
            session = self.sessions[id] = self._serve(id, config)
        check(session)
        try:
            await session.settle()
        except Exception:
            self._drop(session)
            raise
        return OpenSession(session, self.address)

    def find(self, id: str, key: str | None = None, *, for_call: bool = False) -> ServedSession:
        """The session of this id; one that has left memory is read from the store, with a `key` only if it fits.

        For a call that will be refused because the session has ended, nothing is read.
        """

        def check(session: ServedSession) -> None:
            if key is not None and not (session.admits(key) or session.is_owned_by(key)):
                raise Refusal.wrong_key()
            if for_call and session.status != "open":
                raise session.refusal()

        if id not in self.sessions and is_id(id):
            self._recover("id = ?", (id,), check)
        if id not in self.sessions:
            raise Refusal(
                404, "not_found", f"session {id[:80]!r} does not exist; open one with POST /sessions", retry=False
            )
        return self.sessions[id]

    async def delete(self, id: str) -> None:
        """Delete a session and everything that was recorded of it."""
        session = self.find(id)
        await session.delete()
        self._drop(session)

    def _drop(self, session: ServedSession) -> None:
        if self.sessions.get(session.id) is session:  # there may be a new one with this id by now
            del self.sessions[session.id]

    def _serve(self, id: str, config: SessionConfig, key: str | None = None) -> ServedSession:
        engine, template = self.engine.for_session(id), self.config.template
        return ServedSession(
            engine,
            self.store,
            self.clock,
            id,
            config,
            key,
            template=None if template == "auto" else template_of(template, engine.tokenizer),
            reasoning=self.config.reasoning,
            thinks=self.config.thinks,
            max_recorded=self.config.session_tokens,
        )

    def _recover_open(self) -> None:
        if not self._recovered and hasattr(self.engine, "tokenizer"):  # a relay gets it from its first worker
            self._recovered = True
            self._recover("status = ?", ("open",))

    def _recover(
        self, condition: str, values: tuple[str, ...], check: Callable[[ServedSession], None] | None = None
    ) -> None:
        """Restore sessions from the store. A `check` comes first, so that a stranger cannot make us read a session."""
        if self.store is None:
            return
        columns = "id, key, config, number, opened_at, status, closed_at, outcome, reason, snapshot"
        query = f"SELECT {columns} FROM sessions WHERE {condition}"
        for id, key, config_json, *row in self.store.rows(query, values):
            if id not in self.sessions:
                session = self._serve(id, SessionConfig.model_validate_json(config_json), key)
                _, _, session.status, *_ = row
                if check is not None:
                    check(session)
                session.restore(tuple(row), self.store)
                self.sessions[id] = session

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._recover_open()
            await self._tidy()

    async def _tidy(self) -> None:
        """Close sessions that have expired, and release those that have ended and can be read again."""
        for session in list(self.sessions.values()):
            with suppress(StorageError):  # the next sweep tries again; requests for it raise the error
                await session.tidy()
            if self._is_over(session):
                self._drop(session)

    def _is_over(self, session: ServedSession) -> bool:
        """Whether a session can leave memory: it can be read again, or its owner has collected its episode."""
        age_s = session.seconds_since_end()
        if session.status == "deleted":  # and the client that deleted it has left
            return age_s > 0
        if self._forgets:
            return age_s > _IN_MEMORY_S
        return session.status == "complete" and age_s > self.config.kept_s
