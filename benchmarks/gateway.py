"""The gateway: what it adds to a call, beside a bare hop and LiteLLM's proxy, and what a long session adds to a turn.

All answer the same conversations, 30 kB to a request and 200 sampled tokens to an answer. The bare hop and LiteLLM hand
them on to a server that answers at once; ours renders the messages, samples from an engine that answers at once, and
has every turn on disk before it answers. Clients, hops and that server share the machine, so that what a request costs
is given in processor time as well.

The comparison is not even, in either direction: the bare hop parses nothing and stores nothing, but has a call to
another process, which on a machine of two cores competes with it; our engine is in the gateway's process. A gateway
with a remote engine pays for that call, too.
"""

import sqlite3
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from benchmarks.hops import Hop, hop, litellm
from benchmarks.load import Place, conversation, crowd, talk
from benchmarks.measure import Ratio
from loopwright.core.runtime import run as run_loop

TURNS, FIRST_BYTES, DELTA_BYTES = 21, 20_000, 200
"""The first request of a conversation is not measured; those after it have 30 kB on average."""
CLIENTS, ROUNDS = 32, 9
SLOW_TURNS, SLOW_ROUNDS = 5, 3
"""For LiteLLM, which takes its time."""
LONG, LONG_DELTA_BYTES, SESSIONS = 100, 1_200, 7
"""A session of 50 k tokens: in every turn 200 are sampled and 300 given."""
DISK = Path("/var/tmp")  # where the usual place may be in memory


@dataclass
class Side:
    """One way for a request to go, and what was measured of it: the best p50, and of many clients the usual rate.

    The best rate would be a matter of luck: that of the bare hop differs by half from round to round. Rates are
    compared within each round, because a busy machine slows down all sides of it.
    """

    hop: Hop
    sessions: bool = False
    """Whether every client needs one."""
    p50_ms: float = float("inf")
    rates: list[float] = field(default_factory=list)
    cpu_us: float = float("inf")
    opened_places: list[Place] = field(default_factory=list)

    def places(self, count: int) -> list[Place]:
        """Where so many new clients go."""
        if not self.sessions:
            return [Place(f"{self.hop.url}/v1", self.hop.key)] * count
        places = [open_session(self.hop.url) for _ in range(count)]
        self.opened_places += places
        return places

    def alone(self, bodies: Sequence[bytes]) -> None:
        """Measure one client."""
        taken_s = run_loop(talk(self.places(1)[0], bodies))
        self.p50_ms = min(self.p50_ms, 1000 * statistics.median(taken_s[1:]))

    def crowded(self, bodies: Sequence[bytes]) -> None:
        """Measure many clients."""
        places, before = self.places(CLIENTS), self.hop.cpu_s
        self.rates.append(run_loop(crowd(places, bodies)))
        self.cpu_us = min(self.cpu_us, (self.hop.cpu_s - before) / (CLIENTS * len(bodies)) * 1e6)

    @property
    def rate(self) -> float:
        """Requests/s."""
        return statistics.median(self.rates)

    def rate_against(self, other: "Side") -> float:
        """The usual ratio of the rates of a round."""
        return statistics.median(one / each for one, each in zip(self.rates, other.rates, strict=False))

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s, p50 {self.p50_ms:.2f} ms, {self.cpu_us:.0f} µs of CPU each"


def open_session(url: str) -> Place:
    """A new session there."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/sessions", method="POST")) as answer:
        session = orjson.loads(answer.read())
    return Place(session["openai_base_url"], session["key"])


def run() -> list[Ratio]:
    """Whole answers, streams, and a long session."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=DISK if DISK.is_dir() else None)))
        direct = stack.enter_context(hop("direct"))
        bare = stack.enter_context(hop("raw", direct.url))
        output = home / "gateway"
        ours = Side(stack.enter_context(hop("ours", "--output", str(output))), sessions=True)
        sides = {"direct": Side(direct), "bare": Side(bare), "ours": ours}
        slow = stack.enter_context(litellm(direct.url, home))
        ratios = [*whole(sides, None if slow is None else Side(slow)), long(ours)]
        _check(output, len(ours.opened_places))
        stream = Side(
            stack.enter_context(hop("ours", "--output", str(home / "streams"), "--set", "engine.block=10")), True
        )
        ratios.append(streamed({"bare": Side(bare), "ours": stream}))
    return ratios


def whole(sides: dict[str, Side], slow: Side | None) -> list[Ratio]:
    """Answers that come as a whole."""
    bodies = conversation(TURNS, FIRST_BYTES, DELTA_BYTES)
    for number in range(ROUNDS):
        for side in sides.values():
            side.alone(bodies)
            side.crowded(bodies)
        if slow is not None and number < SLOW_ROUNDS:  # in between, as the machine is not always as quick
            slow.alone(bodies)
            slow.crowded(bodies[:SLOW_TURNS])
    direct, bare, ours = sides["direct"], sides["bare"], sides["ours"]
    ours_ms, bare_ms = ours.p50_ms - direct.p50_ms, bare.p50_ms - direct.p50_ms
    ratios = [
        Ratio(
            "gateway: added to the p50 of one client, against a bare hop",
            ours_ms / bare_ms,
            1.5,
            detail=f"{ours_ms:.2f} and {bare_ms:.2f} ms; direct {direct}",
        ),
        Ratio(
            f"gateway: requests/s of {CLIENTS} clients, against a bare hop",
            ours.rate_against(bare),
            0.5,
            at_least=True,
            detail=f"{ours}; bare {bare}",
        ),
    ]
    if slow is not None:
        name = f"gateway: requests/s of {CLIENTS} clients, against LiteLLM's proxy"
        ratios.append(Ratio(name, ours.rate_against(slow), 20, at_least=True, detail=f"LiteLLM {slow}"))
    return ratios


def streamed(sides: dict[str, Side]) -> Ratio:
    """Answers that come in 20 pieces."""
    bodies = conversation(TURNS, FIRST_BYTES, DELTA_BYTES, stream=True)
    for _ in range(ROUNDS):
        for side in sides.values():
            side.alone(bodies)
            side.crowded(bodies)
    ours, bare = sides["ours"], sides["bare"]
    name = f"gateway: streams/s of {CLIENTS} clients, against a bare hop"
    return Ratio(name, ours.rate_against(bare), 0.4, at_least=True, detail=f"{ours}; bare {bare}")


def long(ours: Side) -> Ratio:
    """The hundredth turn of a session beside its second: medians over sessions, the best of several rounds."""
    bodies = conversation(LONG, 0, LONG_DELTA_BYTES)
    rounds = [[run_loop(talk(place, bodies)) for place in ours.places(SESSIONS)] for _ in range(ROUNDS)]
    second, last = (
        1000 * min(statistics.median(taken_s[turn] for taken_s in each) for each in rounds) for turn in (1, -1)
    )
    detail = (
        f"{last:.2f} and {second:.2f} ms; requests of {len(bodies[-1]) / 1000:.0f} and {len(bodies[1]) / 1000:.0f} kB"
    )
    return Ratio(f"gateway: turn {LONG} of a session, 50 k tokens, against turn 2", last / second, 1.25, detail=detail)


def _check(output: Path, sessions: int) -> None:
    """RuntimeError unless every turn is on disk, as a client that got an answer may expect."""
    long_ones = ROUNDS * SESSIONS
    expected = (sessions - long_ones) * TURNS + long_ones * LONG
    with sqlite3.connect(output / "gateway.db") as db:
        (finished,) = db.execute("SELECT count(*) FROM nodes WHERE ended_at IS NOT NULL").fetchone()
    if finished != expected:
        raise RuntimeError(f"{finished} turns are on disk, and {expected} were answered")


if __name__ == "__main__":
    print(*run(), sep="\n")
