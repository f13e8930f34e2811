"""The HTTP client of a judger: one session, opened at the first request, reused and closed."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import MissingExtra, Problem
from loopwright.rollouts.judgers.base import JudgeFailed

if TYPE_CHECKING:
    from aiohttp import ClientSession

_MOST_BYTES = 4 * 2**20
_SHOWN_BYTES = 200


class Client:
    """Posts JSON and reads JSON; anything but a 200 with JSON in it is a failed verdict. The guard limits the time."""

    def __init__(self, connections: int, headers: Mapping[str, str] | None = None) -> None:
        self._connections, self._headers = connections, dict(headers or {})
        self._session: ClientSession | None = None
        self._closed = False

    async def post(self, url: str, body: Any) -> Any:
        """What the server answers."""
        data = encoded(body)
        async with self._opened().post(url, data=data, allow_redirects=False) as response:
            answer = await _read(response.content, url)
            if response.status != 200:
                shown = answer[:_SHOWN_BYTES].decode(errors="replace")
                raise JudgeFailed(f"{url} answered {response.status} {response.reason or ''}: {shown}".rstrip(": "))
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise JudgeFailed(f"{url} answered no JSON: {answer[:_SHOWN_BYTES].decode(errors='replace')}") from error

    async def close(self) -> None:
        """Let the connections go."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _opened(self) -> "ClientSession":
        if self._closed:
            raise JudgeFailed("the judger was closed")
        if self._session is None:
            try:
                from aiohttp import ClientSession, ClientTimeout, TCPConnector
            except ModuleNotFoundError as error:
                raise MissingExtra("judging over HTTP", "rollouts") from error
            self._session = ClientSession(
                connector=TCPConnector(limit=self._connections),
                headers={"Content-Type": "application/json", **self._headers},
                timeout=ClientTimeout(total=None),
            )
        return self._session


def encoded(body: Any) -> bytes:
    """JSON; JudgeFailed if something in it is none."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise JudgeFailed(f"what the judger needs is not JSON: {error}") from error


async def _read(content: Any, url: str) -> bytes:
    data = b""
    async for chunk in content.iter_any():
        data += chunk
        if len(data) > _MOST_BYTES:
            raise JudgeFailed(f"{url} answered more than {_MOST_BYTES >> 20} MiB")
    return data


def problems_with(url: str, key: str) -> list[Problem]:
    """What can be told of a URL, and of the client itself, without asking anybody."""
    found = []
    if not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
        found.append(Problem(key, f"{url!r} is no URL; write for example 'http://localhost:8000/judge'."))
    if find_spec("aiohttp") is None:
        found.append(Problem("type", str(MissingExtra("judging over HTTP", "rollouts"))))
    return found
