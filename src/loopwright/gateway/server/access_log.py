"""The access log, and what counts requests: one line of JSON for each, without what was said and without any key."""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from loopwright.core.errors import StorageError
from loopwright.engines.base import ContextFull, EngineError
from loopwright.gateway.server.metrics import CONTENT_TYPE, Metrics
from loopwright.gateway.server.request_handler import ASKED

if TYPE_CHECKING:
    from loopwright.gateway.dialects.base import TurnRequest
    from loopwright.gateway.gateway import Gateway
    from loopwright.gateway.sessions.call import SessionCall

log = logging.getLogger(__name__)
_LEFT = 499
"""The status of a request whose client left before its answer."""
_SILENT = ("/healthz", "/metrics")


class AccessLog:
    """Lines in a file that only its owner can read, or on standard output (`-`)."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._broken = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.dup(1) if place == "-" else os.open(place, flags, 0o600)
        except OSError as error:
            raise StorageError(f"the access log {place} cannot be written: {error.strerror}.") from error

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line. A disk that is full costs lines and no answers."""
        try:
            os.write(self._file, orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
            self._broken = False
        except OSError as error:
            if not self._broken:
                log.warning("the access log %s cannot be written: %s", self._place, error)
            self._broken = True

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class RequestObserver:
    """Sees every request end: counts it, and writes it down where an access log is asked for."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway, self.metrics = gateway, Metrics()
        place = gateway.config.access_log
        self._log = None if place is None else AccessLog(place)

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Around everything else."""
        begun, status = time.perf_counter(), _LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._ended(request, status, time.perf_counter() - begun)

    def exposed(self, calls: int, sessions: int, queue: int) -> web.Response:
        """The metrics as an answer."""
        now = {"sessions_open": sessions, "calls_in_flight": calls, "store_queue": queue}
        return web.Response(body=self.metrics.text(now).encode(), headers={"content-type": CONTENT_TYPE})

    def close(self) -> None:
        """Let go of the access log."""
        if self._log is not None:
            self._log.close()

    def _ended(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        route = "other" if resource is None else resource.canonical
        self.metrics.answered(route, status, seconds)
        asked = request.get(ASKED)
        if asked is not None:
            self._called(asked[1])
        if self._log is not None and route not in _SILENT:
            self._log.write(self._entry(request, route, status, seconds, asked))

    def _called(self, call: "SessionCall") -> None:
        """Count what a call sampled, once, however often it is followed."""
        sampled = sum(len(draft.ids) for draft in call.drafts)
        self.metrics.sampled_tokens += sampled - call.counted
        call.counted = sampled
        if call.turns is not None and not call.told:
            call.told = True
            for draft in call.drafts:
                self.metrics.turns[call.served.session.verdicts[draft.node].kind] += 1
        if isinstance(call.error, EngineError) and not isinstance(call.error, ContextFull):
            self.metrics.engine_errors += 1

    def _entry(
        self,
        request: web.Request,
        route: str,
        status: int,
        seconds: float,
        asked: "tuple[TurnRequest, SessionCall] | None",
    ) -> dict[str, Any]:
        id = request.match_info.get("id")
        entry = {
            "time": self._gateway.clock(),
            "method": request.method,
            "route": route,
            # Only what is known to be a session: whatever else stands in a path may be anybody's secret.
            "session": id if self._gateway.knows(id) else None,
            "status": status,
            "duration_s": round(seconds, 6),
        }
        if asked is None:
            return entry
        ask, call = asked
        verdicts = call.served.session.verdicts
        entry |= {
            "dialect": call.dialect,
            "call": call.id,
            "streamed": call.streamed,
            "prompt_tokens": call.drafts[0].prompt_tokens,
            "sampled_tokens": sum(len(draft.ids) for draft in call.drafts),
            "verdict": verdicts[call.drafts[0].node].kind,
            "error": None if call.error is None else type(call.error).__name__,
        }
        if self._gateway.config.log_prompts:
            entry["messages"] = ask.messages
            entry["said"] = [call.served.session.graph.nodes[draft.node].message for draft in call.drafts]
        return entry
