"""Metrics: what the gateway does, counted, in the plain text that Prometheus reads."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "loopwright_gateway_"
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_HELP = {
    "requests_total": "Requests that were answered, by route and status; 499 where the client left.",
    "request_seconds": "Seconds from a request to the end of its answer.",
    "sampled_tokens_total": "Tokens that the engine sampled.",
    "turns_total": "Turns by what they are worth.",
    "engine_errors_total": "Calls that the engine failed.",
    "sessions_open": "Sessions that take calls.",
    "calls_in_flight": "Calls that are being answered, or wait for their turn.",
    "store_queue": "Writes that wait for the disk.",
}
_LABELS = dict[str, str]
Sample = tuple[str, _LABELS, float]
"""What follows the metric's name, labels, and a value."""


def family(name: str, kind: str, said: str, samples: Iterable[Sample]) -> Iterator[str]:
    """The lines of one metric."""
    yield from (f"# HELP {name} {said}", f"# TYPE {name} {kind}")
    yield from (f"{name}{suffix}{_labels(labels)} {value:.12g}" for suffix, labels, value in samples)


class Metrics:
    """Counts what happens. Labels are routes, statuses and verdicts: few, whatever anybody sends."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.turns: Counter[str] = Counter()
        self.sampled_tokens = self.engine_errors = 0
        self._seconds: dict[str, list[int]] = {}
        self._total_s: dict[str, float] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request came to its end."""
        self.requests[route, status] += 1
        counts = self._seconds.get(route)
        if counts is None:
            counts = self._seconds[route] = [0] * (len(_BOUNDS_S) + 1)
        counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._total_s[route] = self._total_s.get(route, 0.0) + seconds

    def text(self, now: Mapping[str, int]) -> str:
        """All of it; `now` has what is not counted but looked up, such as `sessions_open`."""
        lines: list[str] = []

        def add(name: str, kind: str, samples: Iterable[Sample]) -> None:
            lines.extend(family(_PREFIX + name, kind, _HELP[name], samples))

        requests = sorted(self.requests.items())
        add("requests_total", "counter", [("", {"route": r, "status": str(s)}, n) for (r, s), n in requests])
        add("request_seconds", "histogram", self._histogram())
        add("sampled_tokens_total", "counter", [("", {}, self.sampled_tokens)])
        add("turns_total", "counter", [("", {"verdict": kind}, n) for kind, n in sorted(self.turns.items())])
        add("engine_errors_total", "counter", [("", {}, self.engine_errors)])
        for name, value in now.items():
            add(name, "gauge", [("", {}, value)])
        return "\n".join([*lines, ""])

    def _histogram(self) -> Iterable[Sample]:
        for route, counts in sorted(self._seconds.items()):
            below = 0
            for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), counts, strict=True):
                below += count
                yield "_bucket", {"route": route, "le": bound}, below
            yield "_sum", {"route": route}, self._total_s[route]
            yield "_count", {"route": route}, below


def _labels(labels: _LABELS) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
