"""Routes for those who operate the gateway: health, metrics, OpenAPI, and control of the engines."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from loopwright.core.errors import StorageError
from loopwright.engines.base import EngineError
from loopwright.engines.fleet import Fleet
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.dialects.base import parse_object
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.relay.relay import Relay
from loopwright.gateway.server.observer import RequestObserver, metrics_response
from loopwright.gateway.server.openapi import describe_routes
from loopwright.gateway.server.request_handler import json_response

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
"""Seconds in which engine and store have to pass a health check."""


class Operations:
    """Health and metrics, and what only the owner of the gateway's token may do: pause engines and load weights."""

    def __init__(self, gateway: "Gateway", observer: RequestObserver, is_admin: Callable[[web.Request], bool]) -> None:
        self._gateway, self._observer, self._is_admin = gateway, observer, is_admin
        self._failing: tuple[str, ...] = ()
        self._updates: set[asyncio.Future[int]] = set()

    def mount(self, app: web.Application) -> None:
        """Add the routes, and those of a relay for its workers."""
        add = app.router.add_route
        add("GET", "/healthz", self.health)
        add("GET", "/metrics", self.metrics)
        add("GET", "/openapi.json", self.openapi)
        add("GET", "/engines", self.engines)
        add("POST", "/weights", self.weights)
        add("POST", "/pause", self.pause)
        add("POST", "/resume", self.resume)
        if isinstance(self._gateway.engine, Relay):
            self._gateway.engine.mount(app, self._is_admin)

    async def drain(self, server: web.Server) -> None:
        """Let a relay's calls end while its workers are still connected."""
        gateway = self._gateway
        if isinstance(gateway.engine, Relay):
            await gateway.engine.drain(server, lambda: gateway.count()[1], gateway.config.drain_s)

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Anyone may ask, so the details of a problem are only logged."""
        problems = {}
        for part in ("engine", "store"):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    if part == "engine":
                        await self._gateway.engine.check()
                    elif self._gateway.store is not None:
                        await self._gateway.store.check()
            except TimeoutError:
                problems[part] = f"no response within {_TIMEOUT_S:g} s"
            except (EngineError, StorageError) as error:
                problems[part] = str(error)
        if tuple(problems) != self._failing:
            self._failing = tuple(problems)
            log.warning("health: %s", "; ".join(f"{part}: {why}" for part, why in problems.items()) or "ok again")
        status = {"status": "failing" if problems else "ok", "version": self._gateway.engine.version}
        return json_response({**status, "failing": list(problems)}, 503 if problems else 200)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Metrics for Prometheus."""
        if self._gateway.token is not None:
            self._check(request)
        return metrics_response(self._observer.collect)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """The description of all routes."""
        return json_response(describe_routes(request.app.router))

    # -- engines ------------------------------------------------------------------------------------------------

    async def engines(self, request: web.Request) -> web.StreamResponse:
        """The engines and their versions."""
        self._check(request)
        return self._describe_engines()

    async def weights(self, request: web.Request) -> web.StreamResponse:
        """Load new weights into the engines."""
        self._check(request)
        body = parse_object(await request.read())
        version, paused = body.get("version"), body.get("paused", False)
        if type(version) is not int or version < 0 or not isinstance(paused, bool):
            raise Refusal(400, "invalid", "version: expected an integer; paused: true or false", retry=False)
        source = body.get("source", body.get("weights"))
        if not isinstance(source, str | None):
            raise Refusal(400, "invalid", "source: expected a path, as the engines see it", retry=False)
        return await self._publish(WeightUpdate(version, paused, source))

    async def pause(self, request: web.Request) -> web.StreamResponse:
        """Pause all calls."""
        self._check(request)
        return await self._publish(WeightUpdate(self._gateway.engine.version, paused=True))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """Continue all calls."""
        self._check(request)
        return await self._publish(WeightUpdate(self._gateway.engine.version))

    def _check(self, request: web.Request) -> None:
        if not self._is_admin(request):
            raise Refusal(401, "authentication", "this needs the gateway's token (--token-file)", retry=False)

    async def _publish(self, update: WeightUpdate) -> web.StreamResponse:
        """An update that has started is completed, even if its client leaves."""
        work = asyncio.ensure_future(self._gateway.apply_update(update))
        self._updates.add(work)
        work.add_done_callback(self._updates.discard)
        await asyncio.shield(work)
        return self._describe_engines()

    def _describe_engines(self) -> web.StreamResponse:
        engine = self._gateway.engine
        data: dict[str, Any] = {"version": engine.version}
        if isinstance(engine, Fleet):
            data["engines"] = engine.describe()
        return json_response(data)
