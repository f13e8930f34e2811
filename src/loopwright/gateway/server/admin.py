"""What whoever holds the gateway's token may do with its engines: pause them, give them weights, see how they are."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from loopwright.engines.fleet import Fleet
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.body import parse_object
from loopwright.gateway.server.request_handler import json_response

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway
    from loopwright.gateway.relay.relay import Relay


class Admin:
    """The routes of whoever runs the gateway: no agent may change what it is served by."""

    def __init__(self, gateway: "Gateway", admits: Callable[[web.Request], bool]) -> None:
        self._gateway, self._admits = gateway, admits
        self._under_way: set[asyncio.Future[int]] = set()

    def mount(self, app: web.Application) -> None:
        """Add the routes; a relay's door for workers too."""
        app.router.add_route("GET", "/engines", self._engines)
        app.router.add_route("POST", "/weights", self._weights)
        app.router.add_route("POST", "/pause", self._pause)
        app.router.add_route("POST", "/resume", self._resume)
        if (relay := self._relay()) is not None:
            relay.mount(app, self._admits)

    async def end(self, server: web.Server) -> None:
        """Let calls end first where workers have to be heard for that."""
        gateway = self._gateway
        if (relay := self._relay()) is not None:
            await relay.end(server, lambda: gateway.counted()[1], gateway.config.drain_s)

    def _relay(self) -> "Relay | None":
        from loopwright.gateway.relay.relay import Relay

        return self._gateway.engine if isinstance(self._gateway.engine, Relay) else None

    async def _engines(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        return self._told()

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        body = parse_object(await request.read())
        version, paused = body.get("version"), body.get("paused", False)
        if type(version) is not int or version < 0 or not isinstance(paused, bool):
            raise Refusal(400, "invalid", "version: a whole number; paused: true or false", retry=False)
        source = body.get("source", body.get("weights"))
        if not isinstance(source, str | None):
            raise Refusal(400, "invalid", "source: a path, as the engines see it", retry=False)
        await self._done(WeightUpdate(version, paused, source))
        return self._told()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        await self._done(WeightUpdate(self._gateway.engine.version, paused=True))
        return self._told()

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        await self._done(WeightUpdate(self._gateway.engine.version))
        return self._told()

    def _check(self, request: web.Request) -> None:
        if not self._admits(request):
            raise Refusal(401, "authentication", "this needs the gateway's token (--token-file)", retry=False)

    async def _done(self, update: WeightUpdate) -> None:
        """An update that has begun comes to its end, also when whoever asked for it has left."""
        work = asyncio.ensure_future(self._gateway.apply_update(update))
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        await asyncio.shield(work)

    def _told(self) -> web.StreamResponse:
        engine = self._gateway.engine
        told: dict[str, Any] = {"version": engine.version}
        if isinstance(engine, Fleet):
            told["engines"] = engine.describe()
        return json_response(told)
