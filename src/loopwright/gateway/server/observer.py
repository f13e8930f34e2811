"""Observes requests: metrics for Prometheus, and the access log with one line of JSON per request.

Neither contains keys; the access log contains messages only if that is configured.
"""

import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from loopwright.core.errors import StorageError
from loopwright.engines.base import ContextFull, EngineError
from loopwright.gateway.dialects.base import TurnRequest
from loopwright.gateway.sessions.call import SessionCall

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
CALL = web.RequestKey("call", tuple[TurnRequest, SessionCall])
"""The parsed request and its call, if the request came that far."""
_PREFIX = "loopwright_gateway_"
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_UNLOGGED = ("/healthz", "/metrics")


def metrics_response(collect: Callable[[], Iterable[Metric]]) -> web.Response:
    """Metric families as a response that Prometheus can scrape."""

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return collect()

    registry = CollectorRegistry()
    registry.register(Families())
    return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class AccessLog:
    """Lines in a file that only its owner can read, or on standard output (`-`)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_failed = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.dup(1) if path == "-" else os.open(path, flags, 0o600)
        except OSError as error:
            raise StorageError(f"cannot write the access log {path}: {error.strerror}.") from error

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line. If the disk is full, lines are lost, but requests still succeed."""
        try:
            os.write(self._file, orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write the access log %s: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RequestObserver:
    """Counts every request when it ends, and writes it to the access log if there is one.

    Counts are plain integers, which cost a request next to nothing; they become metric families when they are scraped.
    Labels are routes, statuses and verdicts: few, whatever clients send.
    """

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        path = gateway.config.access_log
        self._log = None if path is None else AccessLog(path)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._turns: Counter[str] = Counter()
        self._sampled_tokens = self._engine_errors = 0
        self._buckets: dict[str, list[int]] = {}
        self._total_s: dict[str, float] = {}

    def close(self) -> None:
        """Close the access log."""
        if self._log is not None:
            self._log.close()

    def observe(self, request: web.Request, route: str, id: str | None, status: int, seconds: float) -> None:
        """Record a request that has ended; `id` is that of its session, if it names one."""
        self._requests[route, status] += 1
        if (buckets := self._buckets.get(route)) is None:
            buckets = self._buckets[route] = [0] * (len(_BOUNDS_S) + 1)
        buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s[route] = self._total_s.get(route, 0.0) + seconds
        if (entry := request.get(CALL)) is not None:
            call = entry[1]
            # What a call sampled is counted once, however many requests follow it.
            sampled = sum([draft.sampled for draft in call.drafts])
            self._sampled_tokens += sampled - call.tokens_counted
            call.tokens_counted = sampled
            if call.turns is None:
                if isinstance(error := call.error, EngineError) and not isinstance(error, ContextFull):
                    self._engine_errors += 1
            elif not call.turns_counted:
                call.turns_counted = True
                for draft in call.drafts:
                    self._turns[call.owner.session.verdicts[draft.node].kind] += 1
        if self._log is not None and route not in _UNLOGGED:
            self._log.write(self._log_entry(request, route, id, status, seconds))

    def _log_entry(
        self, request: web.Request, route: str, id: str | None, status: int, seconds: float
    ) -> dict[str, Any]:
        entry = {
            "time": self._gateway.clock(),
            "method": request.method,
            "route": route,
            # Only ids of sessions: anything else in a path may be somebody's secret.
            "session": id if id in self._gateway.sessions else None,
            "status": status,
            "duration_s": round(seconds, 6),
        }
        if CALL not in request:
            return entry
        turn_request, call = request[CALL]
        session = call.owner.session
        verdict = session.verdicts.get(call.drafts[0].node)  # none if it was refused
        entry |= {
            "dialect": call.record.dialect,
            "call": call.id,
            "streamed": call.streamed,
            "prompt_tokens": call.drafts[0].prompt_tokens,
            "sampled_tokens": sum(draft.sampled for draft in call.drafts),
            "verdict": None if verdict is None else verdict.kind,
            "error": None if call.error is None else type(call.error).__name__,
        }
        if self._gateway.config.log_prompts:
            entry["messages"] = turn_request.messages
            entry["said"] = [session.graph.nodes[draft.node].message for draft in call.drafts if verdict is not None]
        return entry

    def collect(self) -> Iterable[Metric]:
        """All metrics, for `metrics_response`."""
        requests = CounterMetricFamily(
            f"{_PREFIX}requests",
            "Requests by route and status; 499 if the client left.",
            labels=["route", "status"],
        )
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            f"{_PREFIX}request_seconds", "Seconds from a request to the end of its response.", labels=["route"]
        )
        for route, counts in sorted(self._buckets.items()):
            buckets = zip((*map(str, _BOUNDS_S), "+Inf"), accumulate(counts), strict=True)
            seconds.add_metric([route], list(buckets), self._total_s[route])
        yield seconds
        yield CounterMetricFamily(f"{_PREFIX}sampled_tokens", "Tokens sampled by the engine.", self._sampled_tokens)
        turns = CounterMetricFamily(f"{_PREFIX}turns", "Turns by verdict.", labels=["verdict"])
        for verdict, count in sorted(self._turns.items()):
            turns.add_metric([verdict], count)
        yield turns
        yield CounterMetricFamily(f"{_PREFIX}engine_errors", "Calls that failed in the engine.", self._engine_errors)
        sessions, calls = self._gateway.count()
        store = self._gateway.store
        yield GaugeMetricFamily(f"{_PREFIX}sessions_open", "Sessions that accept calls.", sessions)
        yield GaugeMetricFamily(f"{_PREFIX}calls_in_flight", "Calls that are running or waiting.", calls)
        yield GaugeMetricFamily(
            f"{_PREFIX}store_queue", "Writes that wait for the disk.", 0 if store is None else store.queue_length
        )
