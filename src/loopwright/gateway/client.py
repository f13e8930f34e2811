"""The gateway's client: opens sessions at a remote gateway and collects their episodes, over one HTTP session.

async with GatewayClient("http://gpu-box:8400", token) as gateway:
    session = await gateway.open("trial-7", SessionConfig(run="r", trial=7))
    …                                   # an agent gets session.openai_base_url and session.key
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
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 2.0
_MAX_EXCERPT = 200
_UPDATE_TIMEOUT_S = 600.0
_PORTS = {"http": 80, "https": 443}


class GatewayLost(LoopwrightError, ConnectionError):
    """A gateway cannot be reached, or what responds is not a gateway."""


def endpoint(url: str, kind: str = "gateway", port: int = 8400) -> tuple[str, int]:
    """Host and port of a URL; without a port, that of its scheme. ValueError if it is not a URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _PORTS and parts.hostname:
            return parts.hostname, parts.port or _PORTS[parts.scheme]
    except ValueError:
        pass  # the port is not a number
    raise ValueError(f"{url!r} is not the URL of a {kind}; write for example 'http://gpu-box:{port}'")


@dataclass(frozen=True, slots=True)
class CompletedSession:
    """What a session had recorded when it was completed."""

    episode: Episode
    broken: str
    """Why one of its turns is broken; empty if none is."""
    silent_s: float
    """How long the engine had returned no token to a call that was running at the end."""
    restored: bool = False
    """Whether the gateway was restarted while it was open, so that its agent may have lost calls."""


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A session at a remote gateway, for its owner."""

    client: "GatewayClient" = field(repr=False)
    id: str
    key: str = field(repr=False)
    openai_base_url: str
    anthropic_base_url: str
    owner_key: str | None = field(default=None, repr=False)
    """The secret of the run that opened it, without which the session belongs to everyone with its key."""

    async def describe(self) -> dict[str, Any]:
        """Its status, graph, rows for training, and a verdict per turn."""
        return await self.client.request("GET", f"/sessions/{self.id}", key=self.owner_key or self.key)

    async def complete(self, outcome: Outcome = Outcome.OK, reason: str = "") -> CompletedSession:
        """End the session; returns all that its owner may need. Calling it again changes nothing."""
        body = {"outcome": str(outcome), "reason": reason}
        path = f"/sessions/{self.id}/complete"
        data = await self.client.request("POST", path, body, key=self.owner_key or self.key, survive_restart=True)
        try:
            broken = next((turn["reason"] for turn in data["turns"] if turn["verdict"] == "broken"), "")
            episode, silent_s = Episode.from_json(data["episode"]), float(data.get("silent_s", 0.0))
            return CompletedSession(episode, broken, silent_s, bool(data.get("restored", False)))
        except (KeyError, TypeError, ValueError) as error:
            raise GatewayLost(
                f"{self.client.url} returned no session: {error!r}. Is it a Loopwright gateway?"
            ) from error

    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End the session; returns its episode, without a reward."""
        return (await self.complete(outcome, reason)).episode

    async def delete(self) -> None:
        """Delete it and everything that was recorded of it. Calling it again changes nothing."""
        try:
            await self.client.request("DELETE", f"/sessions/{self.id}", key=self.owner_key or self.key)
        except Refusal as error:
            if error.status != 404:
                raise


class GatewayClient:
    """A remote gateway. Its requests can be repeated safely, so those that fail on the way are."""

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
        """`away_s`: how long a gateway may be unreachable while it restarts."""
        endpoint(url)
        self.url, self._away_s, self.kind = url.rstrip("/"), away_s, kind
        self._token, self._timeout_s, self._connections = token, timeout_s, connections
        self._session: ClientSession | None = None
        self._closed = False

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> RemoteSession:
        """Open a session. If the id exists, with the same run and trial, it is that session again."""
        body = {} if config is None else config.model_dump(mode="json", exclude_unset=True)
        path, repeatable = "/sessions" if id is None else f"/sessions/{id}", id is not None
        data = await self.request(
            "POST", path, body, key=self._token, repeatable=repeatable, survive_restart=repeatable
        )
        try:
            id, key, openai_base_url, anthropic_base_url = (
                str(data[name]) for name in ("id", "key", "openai_base_url", "anthropic_base_url")
            )
        except KeyError as error:
            raise GatewayLost(
                f"{self.url} opened no session: {error} is missing. Is it a Loopwright gateway?"
            ) from error
        owner_key = None if config is None else config.owner_key
        return RemoteSession(self, id, key, openai_base_url, anthropic_base_url, owner_key)

    async def publish(self, update: WeightUpdate) -> int:
        """Apply a weight update to its engine; returns the version that it is at then."""
        body = {"version": update.version, "paused": update.paused, "weights": update.weights}
        data = await self.request(
            "POST", "/weights", body, key=self._token, timeout_s=_UPDATE_TIMEOUT_S, survive_restart=True
        )
        return int(data["version"])

    async def check(self) -> None:
        """GatewayLost if it cannot be reached."""
        await self.request("GET", "/healthz")

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        repeatable: bool = True,
        survive_restart: bool = False,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request; returns the response. Refusal if it is refused, GatewayLost without a response.

        With `survive_restart`, it is repeated for `away_s` seconds while the gateway cannot be reached.
        """
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise ValueError(f"a request to a remote {self.kind} must be plain data: {error}") from error
        timeout_s = timeout_s or self._timeout_s
        tries = _TRIES + math.ceil(self._away_s / _MAX_PAUSE_S if survive_restart else 0) if repeatable else 1
        for tries_left in reversed(range(tries)):
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._send(method, path, data, key)
            except TimeoutError as error:
                raise GatewayLost(f"{self.url} did not respond within {timeout_s:g} s.") from error
            except OSError as error:  # as aiohttp's errors are
                if isinstance(error, LoopwrightError):
                    raise
                if not tries_left:
                    reason = str(error) or type(error).__name__
                    raise GatewayLost(
                        f"cannot reach the {self.kind} at {self.url}: {reason}. Is it running?"
                    ) from error
            await asyncio.sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (tries - tries_left)))
        raise AssertionError("the last try returns or raises")

    async def _send(self, method: str, path: str, data: bytes | None, key: str | None) -> dict[str, Any]:
        if self._closed:
            raise GatewayLost(f"this client of a {self.kind} is closed")
        try:
            from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
        except ModuleNotFoundError as error:
            raise MissingExtra("a gateway's client", "gateway") from error
        if self._session is None:
            self._session = ClientSession(
                connector=TCPConnector(limit=self._connections),
                headers={"content-type": "application/json"},
                timeout=ClientTimeout(total=None),
            )
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                status, content = response.status, await response.read()
        except ClientError as error:
            raise error if isinstance(error, OSError) else ConnectionError(str(error) or repr(error)) from error
        try:
            answer = orjson.loads(content)
            if status == 200 and isinstance(answer, dict):
                return answer
            details = answer["error"]
            kind = str(details.get("code") or details.get("type"))
            raise Refusal(status, kind, str(details["message"]), retry=False)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            excerpt = content[:_MAX_EXCERPT].decode(errors="replace")
            raise GatewayLost(f"{self.url} responded {status}: {excerpt} Is it a Loopwright {self.kind}?") from None

    async def close(self) -> None:
        """Close the connections."""
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
