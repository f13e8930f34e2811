"""The gateway's HTTP server: starts, stops, and serves the routes by which sessions are opened, read and closed."""

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import ValidationError

from loopwright.core.config import explain
from loopwright.core.outcome import Outcome
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.operations import Operations
from loopwright.gateway.server.request_handler import RequestHandler, json_response
from loopwright.gateway.server.stored_routes import StoredRoutes
from loopwright.gateway.sessions.description import SessionDescription
from loopwright.gateway.sessions.session_config import SessionConfig, is_generated
from loopwright.gateway.settings import is_loopback

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway


class Server:
    """Listens, and serves the routes of sessions."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway, self._config = gateway, gateway.config
        self._handler = handler = RequestHandler(gateway)
        app = web.Application(client_max_size=self._config.body_bytes, middlewares=[handler.middleware])
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=self._config.drain_s
        )
        self._listener: asyncio.Server | None = None
        self.port = 0
        handler.mount(app)  # first, because routes are tried in order
        self._operations = Operations(gateway, handler.observer, handler.is_admin)
        self._operations.mount(app)
        StoredRoutes(handler, self._config.model).mount(app)
        add = app.router.add_route
        add("GET", "/sessions", self._list)
        add("POST", "/sessions", self._open)
        add("POST", "/sessions/{id}", self._open)
        add("GET", "/sessions/{id}", self.show)
        add("DELETE", "/sessions/{id}", self.delete)
        add("POST", "/sessions/{id}/complete", self._complete)
        add("POST", "/sessions/{id}/freeze", self.freeze)
        for path in ("/{id}/v1/models", "/{id}/v1/models/{model:.+}", "/{id}/models"):
            add("GET", path, handler.models)

    async def start(self) -> None:
        """Start to listen."""
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101  it is set up
        self._runner.server.request_handler = self._handler.dispatcher(self._runner.server.request_handler)
        # Not a TCPSite, which would not use our class of connections.
        connect = self._handler.guard.protocol_factory(self._runner.server, access_log=None, keepalive_timeout=75.0)
        try:
            loop, config = asyncio.get_running_loop(), self._config
            self._listener = await loop.create_server(connect, config.host, config.port, backlog=1024)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Accept no more requests; running ones have `drain_s` seconds to end."""
        if self._listener is not None:
            self._listener.close()
        if self._runner.server is not None:
            await self._operations.drain(self._runner.server)
        await self._runner.cleanup()
        await self._handler.close()

    async def _open(self, request: web.Request) -> web.StreamResponse:
        id, is_admin = request.match_info.get("id"), self._handler.is_admin(request)
        if self._gateway.token is not None and not is_admin:
            raise Refusal(401, "authentication", "opening a session needs the gateway's token", retry=False)
        self._refuse_web_pages(request)
        if id is not None and is_generated(id) and not is_admin:
            self._handler.session(request)  # or everyone who has seen its URL would get its key
        try:
            body = await self._handler.read_small_object(request, allow_empty=True)
            config = SessionConfig.model_validate(body)
        except ValidationError as error:
            key, message = next(explain(error, SessionConfig))
            where = f"{key}: " if key else ""
            raise Refusal(400, "invalid", f"{where}{message}", param=key or None, retry=False) from error
        return json_response((await self._gateway.open(id, config)).as_json())

    def _refuse_web_pages(self, request: web.Request) -> None:
        """A page in somebody's browser must not open sessions with the reach of that browser."""
        host, origin = request.url.host or "", request.headers.get("origin")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refusal(403, "permission", "a web page of another site cannot open a session", retry=False)
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise Refusal(403, "permission", f"a web page of {origin[:200]!r} cannot open a session", retry=False)
        is_ours = is_loopback(host) or host == urlsplit(self._gateway.address).hostname
        if self._gateway.token is None and not self._config.public and not is_ours:
            # A web page in a local browser may have pointed its own host name at this machine.
            raise Refusal(403, "permission", "this gateway opens sessions for this machine only", retry=False)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if not self._handler.is_admin(request):
            raise Refusal(401, "authentication", "this needs the gateway's token (--token-file)", retry=False)
        return json_response({"sessions": [each.summary() for each in self._gateway.sessions.values()]})

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Describe a session."""
        session = self._handler.owned_session(request)
        return await _describe(request, await session.verify(request.query.get("snapshot")))

    async def freeze(self, request: web.Request) -> web.StreamResponse:
        """Freeze a session."""
        session = self._handler.owned_session(request)
        await session.freeze()
        return json_response({"id": session.id, "status": session.status, "snapshot": session.snapshot})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._handler.owned_session(request)
        body = await self._handler.read_small_object(request, allow_empty=True)
        outcome, reason = body.get("outcome", Outcome.OK), str(body.get("reason") or "")
        if outcome not in list(Outcome):
            raise Refusal(400, "invalid", f"outcome: one of {', '.join(Outcome)}", param="outcome", retry=False)
        await session.close("complete", Outcome(outcome), reason)
        return await _describe(request, session.description())

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Delete a session."""
        session = self._handler.owned_session(request)
        await self._gateway.delete(session.id)
        return json_response({"id": session.id, "deleted": True})


async def _describe(request: web.Request, description: SessionDescription) -> web.StreamResponse:
    """The description of a session; a large one is written piece by piece, by a thread, as fast as it is read."""
    if description.is_small:
        return json_response(description.as_dict())
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    pieces = description.pieces()
    while piece := await asyncio.to_thread(next, pieces, b""):
        await response.write(piece)
    await response.write_eof()
    return response
