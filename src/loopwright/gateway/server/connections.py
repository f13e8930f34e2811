"""Connections: those that have not shown a valid key are few and short-lived, and bad requests are not repeated.

A server has a limited number of open files. Without limits, anyone who can connect could hold all of them, and so could
an agent with the key of one session.
A client that leaves without reading its response resets the connection; its call records that.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web

from loopwright.gateway.sessions.call import SessionCall

log = logging.getLogger(__name__)


class GuardedConnection(web.RequestHandler):
    """A connection whose first request has to arrive soon."""

    def __init__(self, guard: "ConnectionGuard", server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._guard = guard
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = self._loop.call_later(self._guard.header_s, self._check)
        self._guard.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._guard.remove(self)
        call = self._guard.last_calls.pop(self, None)
        sock = None if self.transport is None else self.transport.get_extra_info("socket")
        # The client may have closed its end before it had read everything.
        is_reset = sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if call is not None and (exc is not None or is_reset):
            call.record_delivery(False)
        super().connection_lost(exc)

    def _check(self) -> None:
        if self._request_count == 0:
            self.abort()

    @property
    def is_idle(self) -> bool:
        """Whether it serves no request."""
        return self._current_request is None

    def abort(self) -> None:
        """Disconnect at once."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """A response to what is not HTTP. aiohttp's would repeat the line at fault, which may contain a key."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        log.warning("refused a malformed request: %s", type(exc).__name__)
        error = {"message": "the request is not valid HTTP", "type": "invalid_request_error", "param": None}
        response = web.json_response({"error": {**error, "code": None}}, status=400)
        response.force_close()
        return response


class ConnectionGuard:
    """The connections without a valid key so far, and those of each session: beyond `limit`, one is disconnected."""

    def __init__(self, limit: int, header_s: float) -> None:
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = limit if most_files == resource.RLIM_INFINITY else max(1, min(limit, most_files // 4))
        self.header_s = header_s
        self.unauthenticated: dict[web.RequestHandler, None] = {}
        """In the order in which they came. A request with a valid key removes its connection."""
        self._sessions: dict[str, dict[web.RequestHandler, None]] = {}
        self._owners: dict[web.RequestHandler, str] = {}
        self.last_calls: dict[web.RequestHandler, SessionCall] = {}
        """The call whose response was the last one on a connection."""

    def add(self, connection: GuardedConnection) -> None:
        """Count a new connection."""
        self.unauthenticated[connection] = None
        if len(self.unauthenticated) > self._limit:
            oldest = next(iter(self.unauthenticated))
            del self.unauthenticated[oldest]
            if isinstance(oldest, GuardedConnection):
                oldest.abort()

    def admit(self, connection: web.RequestHandler, session: str) -> None:
        """Count a connection as one of this session, once it has shown its key."""
        del self.unauthenticated[connection]
        self._owners[connection] = session
        connections = self._sessions.setdefault(session, {})
        connections[connection] = None
        if len(connections) > self._limit:
            others = [each for each in connections if isinstance(each, GuardedConnection) and each is not connection]
            next((each for each in others if each.is_idle), others[0]).abort()

    def remove(self, connection: web.RequestHandler) -> None:
        """Forget a connection that is closed."""
        self.unauthenticated.pop(connection, None)
        if (session := self._owners.pop(connection, None)) is not None:
            del self._sessions[session][connection]
            if not self._sessions[session]:
                del self._sessions[session]

    def protocol_factory(self, server: web.Server, **options: Any) -> Callable[[], GuardedConnection]:
        """Creates a connection of a server."""
        loop = asyncio.get_running_loop()
        # Compressed bodies are refused, but aiohttp would decompress them before anybody reads them.
        return lambda: GuardedConnection(self, server, loop=loop, auto_decompress=False, **options)
