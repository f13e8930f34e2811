"""The gateway: what it adds to a call, beside a bare hop and LiteLLM's proxy, and what a long session adds to a turn.

All answer the same conversations, 30 kB to a request and 200 sampled tokens to an answer. The bare hop and LiteLLM hand
them on to a server that answers at once; ours renders the messages, samples from an engine that answers at once, and
has every turn on disk before it is told.
"""

import asyncio
import sqlite3
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import orjson

from benchmarks.hops import Hop, hop, litellm
from benchmarks.load import Place, conversation, crowd, talk
from benchmarks.measure import Ratio
from loopwright.core.eventloop import run as run_loop

TURNS, FIRST_BYTES, DELTA_BYTES = 21, 20_000, 200
"""The first request of a conversation is not measured; those after it have 30 kB on average."""
CLIENTS, ROUNDS = 32, 5
LONG, LONG_DELTA_BYTES, LONG_SESSIONS = 100, 1_200, 15
"""A session of 50 k tokens: 200 sampled and 300 given in each turn."""
DISK = "/var/tmp"  # which is no memory, as the usual place may be

Places = Callable[[int], Sequence[Place]]
"""Where so many new clients go."""


def places_of(there: Hop, *, sessions: bool) -> Places:
    """Ours wants a session for each client."""

    def opened(count: int) -> list[Place]:
        if not sessions:
            return [Place(f"{there.url}/v1")] * count
        return [_opened(there.url) for _ in range(count)]

    return opened


def _opened(url: str) -> Place:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/sessions", method="POST")) as answer:
        told = orjson.loads(answer.read())
    return Place(told["openai_base_url"], told["key"])


def p50_ms(places: Places, bodies: Sequence[bytes]) -> float:
    """The median of one client's requests, in milliseconds."""
    return 1000 * statistics.median(run_loop(talk(places(1)[0], bodies))[1:])


def rate(places: Places, bodies: Sequence[bytes]) -> float:
    """Requests per second of many clients."""
    return run_loop(crowd(places(CLIENTS), bodies))
