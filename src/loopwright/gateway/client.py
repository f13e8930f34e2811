"""The gateway's client: opens sessions at a gateway elsewhere and brings home their episodes, over one HTTP session.

async with GatewayClient("http://gpu-box:8400", token) as gateway:
    session = await gateway.open("trial-7", SessionConfig(run="r", trial=7))
    …                                   # an agent is given session.openai_base_url and session.key
    episode = await session.close()
"""

import asyncio
import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import orjson

from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError, MissingExtra
from loopwright.core.outcome import Outcome
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig

if TYPE_CHECKING:
    from aiohttp import ClientSession

_TRIES = 4
_PAUSE_S, _LONGEST_S = 0.25, 2.0
_SHOWN = 200
_UPDATE_S = 600.0
"""Seconds that an update of weights may take."""
_PORTS = {"http": 80, "https": 443}


class GatewayLost(LoopwrightError, ConnectionError):
    """A gateway that cannot be reached, or that answers nothing that a gateway would."""


def endpoint(url: str, kind: str = "gateway", port: int = 8400) -> tuple[str, int]:
    """Host and port of a URL; without a port, the one of its scheme. ValueError if it is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _PORTS and parts.hostname:
            return parts.hostname, parts.port or _PORTS[parts.scheme]
    except ValueError:
        pass  # a port that is no number
    raise ValueError(f"{url!r} is no URL of a {kind}; write for example 'http://gpu-box:{port}'")


@dataclass(frozen=True, slots=True)
class CompletedSession:
    """What a session had recorded when it ended."""

    episode: Episode
    broken: str
    """Why a turn of it is broken; empty if none is."""
    silent_s: float
    """How long the engine had given no token, to a call that was under way at the end."""
    restored: bool = False
    """Whether the gateway was started anew while it was open, so that its agent may have found nobody there."""


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A session at a gateway elsewhere, for whoever opened it."""

    client: "GatewayClient" = field(repr=False)
    id: str
    key: str = field(repr=False)
    openai_base_url: str
    anthropic_base_url: str

    async def describe(self) -> dict[str, Any]:
        """How it is: status, graph, rows for training, and a verdict per turn."""
        return await self.client.ask("GET", f"/sessions/{self.id}", key=self.key)

    async def complete(self, outcome: Outcome = Outcome.OK, reason: str = "") -> CompletedSession:
        """End the session; all that its opener may want to know. To do it twice changes nothing."""
        body = {"outcome": str(outcome), "reason": reason}
        data = await self.client.ask("POST", f"/sessions/{self.id}/complete", body, key=self.key, waits=True)
        try:
            broken = next((turn["reason"] for turn in data["turns"] if turn["verdict"] == "broken"), "")
            episode, silent_s = Episode.from_json(data["episode"]), float(data.get("silent_s", 0.0))
            return CompletedSession(episode, broken, silent_s, bool(data.get("restored", False)))
        except (KeyError, TypeError, ValueError) as error:
            raise GatewayLost(
                f"{self.client.url} answered no session: {error!r}. Is it a Loopwright gateway?"
            ) from error

    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End the session; its episode, yet to be judged."""
        return (await self.complete(outcome, reason)).episode

    async def delete(self) -> None:
        """Forget it and all that was recorded of it. To do it twice changes nothing."""
        try:
            await self.client.ask("DELETE", f"/sessions/{self.id}", key=self.key)
        except Refusal as error:
            if error.status != 404:
                raise


class GatewayClient:
    """A gateway elsewhere. Every request that is made here can be made twice, so those that fail on the way are."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        connections: int = 100,
        away_s: float = 0.0,
        kind: str = "gateway",
    ) -> None:
        """`away_s`: how long an unreachable gateway may take to restart. `kind`: the server's name in errors."""
        endpoint(url)
        self.url, self._away_s, self.kind = url.rstrip("/"), away_s, kind
        self._token, self._timeout_s, self._connections = token, timeout_s, connections
        self._session: ClientSession | None = None
        self._closed = False

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> RemoteSession:
        """A new session; with an id that is known, and the same run and trial, the one that there is."""
        body = {} if config is None else config.model_dump(mode="json", exclude_unset=True)
        path = "/sessions" if id is None else f"/sessions/{id}"
        data = await self.ask("POST", path, body, key=self._token, again=id is not None, waits=id is not None)
        try:
            names = ("id", "key", "openai_base_url", "anthropic_base_url")
            return RemoteSession(self, *(str(data[name]) for name in names))
        except KeyError as error:
            raise GatewayLost(
                f"{self.url} opened no session: {error} is missing. Is it a Loopwright gateway?"
            ) from error

    async def publish(self, update: WeightUpdate) -> int:
        """Apply a weight update to its engine; returns the version that it is at then."""
        body = {"version": update.version, "paused": update.paused, "weights": update.weights}
        told = await self.ask("POST", "/weights", body, key=self._token, timeout_s=_UPDATE_S, waits=True)
        return int(told["version"])

    async def check(self) -> None:
        """GatewayLost if nobody is there."""
        await self.ask("GET", "/healthz")

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        again: bool = True,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """What it answers. Refusal if it will not, GatewayLost if it cannot be asked; whoever `waits` gives it time."""
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise ValueError(f"what a gateway elsewhere is told must be plain data: {error}") from error
        timeout_s = timeout_s or self._timeout_s
        tries = _TRIES + math.ceil(self._away_s / _LONGEST_S if waits else 0) if again else 1
        for tries_left in reversed(range(tries)):
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._asked(method, path, data, key)
            except TimeoutError as error:
                raise GatewayLost(f"{self.url} gave no answer within {timeout_s:g} s.") from error
            except OSError as error:  # as aiohttp's own are
                if isinstance(error, LoopwrightError):
                    raise
                if not tries_left:
                    said = str(error) or type(error).__name__
                    raise GatewayLost(f"cannot reach the {self.kind} at {self.url}: {said}. Is it running?") from error
            await asyncio.sleep(min(_LONGEST_S, _PAUSE_S * 2 ** (tries - tries_left)))
        raise GatewayLost(f"cannot reach the {self.kind} at {self.url}.")  # not reached: the last try raises

    async def _asked(self, method: str, path: str, data: bytes | None, key: str | None) -> dict[str, Any]:
        from aiohttp import ClientError

        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            async with self._opened().request(
                method, self.url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                status, answer = response.status, await response.read()
        except ClientError as error:
            raise error if isinstance(error, OSError) else ConnectionError(str(error) or repr(error)) from error
        try:
            read = orjson.loads(answer)
            if status == 200 and isinstance(read, dict):
                return read
            said = read["error"]
            raise Refusal(status, str(said.get("code") or said.get("type")), str(said["message"]), retry=False)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            shown = answer[:_SHOWN].decode(errors="replace")
            raise GatewayLost(f"{self.url} answered {status}: {shown} Is it a Loopwright {self.kind}?") from None

    def _opened(self) -> "ClientSession":
        if self._closed:
            raise GatewayLost(f"this client of a {self.kind} was closed")
        if self._session is None:
            try:
                from aiohttp import ClientSession, ClientTimeout, TCPConnector
            except ModuleNotFoundError as error:
                raise MissingExtra("a gateway's client", "gateway") from error
            self._session = ClientSession(
                connector=TCPConnector(limit=self._connections),
                headers={"content-type": "application/json"},
                timeout=ClientTimeout(total=None),
            )
        return self._session

    async def close(self) -> None:
        """Let the connections go."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
