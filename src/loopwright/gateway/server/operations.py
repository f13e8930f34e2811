"""What whoever runs a gateway looks at: whether it is well, what it has done, and which routes it has."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from loopwright.core.errors import StorageError
from loopwright.engines.base import EngineError
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.access_log import RequestObserver
from loopwright.gateway.server.openapi import described
from loopwright.gateway.server.request_handler import json_response
from loopwright.gateway.sessions.store import PROBE, written

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""Seconds in which an engine says that it is well."""


class Operations:
    """The routes of whoever watches the gateway."""

    def __init__(self, gateway: "Gateway", watch: RequestObserver, admits: Callable[[web.Request], bool]) -> None:
        self._gateway, self._watch, self._admits = gateway, watch, admits
        self._ill: tuple[str, ...] = ()

    def mount(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_route("GET", "/healthz", self._health)
        app.router.add_route("GET", "/metrics", self._metrics)
        app.router.add_route("GET", "/openapi.json", self._openapi)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        """Anybody may ask, so what exactly is wrong stands in the log only."""
        problems = {**await self._engine_problem(), **await self._store_problem()}
        if tuple(problems) != self._ill:
            self._ill = tuple(problems)
            log.warning("health: %s", "; ".join(f"{part}: {said}" for part, said in problems.items()) or "well again")
        told = {"status": "failing" if problems else "ok", "version": self._gateway.engine.version}
        return json_response({**told, "failing": list(problems)}, 503 if problems else 200)

    async def _engine_problem(self) -> dict[str, str]:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._gateway.engine.check()
        except TimeoutError:
            return {"engine": f"it says nothing for {_PATIENCE_S:g} s"}
        except EngineError as error:
            return {"engine": str(error)}
        return {}

    async def _store_problem(self) -> dict[str, str]:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await written(self._gateway.store, PROBE)
        except TimeoutError:
            return {"store": f"nothing is written for {_PATIENCE_S:g} s"}
        except StorageError as error:
            return {"store": str(error)}
        return {}

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        if self._gateway.token is not None and not self._admits(request):
            raise Refusal(401, "authentication", "the metrics need the gateway's token (--token-file)", retry=False)
        sessions, calls = self._gateway.counted()
        return self._watch.exposed(calls, sessions, self._gateway.store.waiting)

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return json_response(described(request.app.router))
