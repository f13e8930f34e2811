"""Large request bodies: how long another session waits while one session sends them, and what they leave behind.

One session sends the largest bodies that the gateway accepts, most of which it refuses; another one sends small
requests all the time. Each body is sent next to a pause of the same length, in which the small requests go on: a busy
machine delays both alike, and what counts is how much later the requests beside large bodies are answered. Gateway,
sender and the client that is watched are processes of their own.
"""

import asyncio
import http.client
import multiprocessing
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from benchmarks.gateway import DISK, open_session
from benchmarks.hops import Hop, hop
from benchmarks.load import Place, conversation
from benchmarks.measure import Ratio
from loopwright.core.runtime import run as run_loop

CONTEXT = 32_768
_BODY_BYTES = 32 * 2**20 - 2000
_ROUNDS = 5
_MIN_PAUSE_S = 0.5
_PAUSE_S = 0.005
_WORDS = " ".join(f"def f{number}(self, value): return {number} * value" for number in range(50_000))


@cache
def bodies() -> dict[str, tuple[str, bytes]]:
    """Paths and bodies of the other session, by what is special about them."""

    def chat(*texts: str, **more: object) -> tuple[str, bytes]:
        messages = [{"role": "user", "content": text} for text in texts]
        return "chat/completions", orjson.dumps({"model": "m", "messages": messages, "max_tokens": 1, **more})

    text = (_WORDS * (_BODY_BYTES // len(_WORDS) + 1))[: _BODY_BYTES - 200]
    return {
        "text beyond the context": chat(text),
        "text of one letter": chat("x" * len(text)),
        "text that just fits": chat(_WORDS[:80_000]),
        "messages that just fit": chat(*["hi"] * 4_000),
        "messages beyond the context": chat(*["hi"] * 700_000),
        "an unknown field of many values": chat("hi", metadata=[[]] * (_BODY_BYTES // 3 - 100)),
        "ids that just fit": ("completions", orjson.dumps({"prompt": [65] * (CONTEXT - 10), "max_tokens": 1})),
        "ids beyond the context": ("completions", orjson.dumps({"prompt": [65] * (_BODY_BYTES // 3 - 100)})),
        "half a body": ("chat/completions", chat(text)[1][: _BODY_BYTES // 2]),
    }


def send(place: Place, name: str) -> None:
    """Send a body; RuntimeError if the gateway fails."""
    (path, body), parts = bodies()[name], urlsplit(place.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    with suppress(BrokenPipeError):  # refused before all of it was sent
        connection.request("POST", f"{parts.path}/{path}", body, {"authorization": f"Bearer {place.key}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    if response.status >= 500:
        raise RuntimeError(f"{name}: status {response.status}")


async def watch(place: Place, body: bytes, sender: Executor, other: Place, name: str) -> Sequence[list[float]]:
    """Seconds that each small request took in a pause, and while the body of this name was sent."""
    client, request, loop = await place.connect(), place.request(body), asyncio.get_running_loop()

    async def ask_until(done: asyncio.Future[None]) -> list[float]:
        taken_s = []
        while not done.done():
            start_s = time.perf_counter()
            await client.ask(request)
            taken_s.append(time.perf_counter() - start_s)
            await asyncio.sleep(_PAUSE_S)
        await done
        return taken_s

    start_s = time.perf_counter()
    during_s = await ask_until(loop.run_in_executor(sender, send, other, name))
    pause = asyncio.sleep(max(time.perf_counter() - start_s, _MIN_PAUSE_S))
    alone_s = await ask_until(asyncio.ensure_future(pause))
    client.close()
    return alone_s, during_s


def p99_ms(taken_s: Sequence[float]) -> float:
    """The 99th percentile."""
    return 1000 * statistics.quantiles(taken_s, n=100)[98]


def delete_session(url: str, place: Place) -> None:
    """Delete a session and what it recorded."""
    id, headers = place.url.split("/")[-2], {"authorization": f"Bearer {place.key}"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/sessions/{id}", headers=headers, method="DELETE")).close()


def resident_mb(gateway: Hop) -> float:
    """Memory of the gateway's own process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def run() -> list[Ratio]:
    """Latency, and memory that is kept."""
    bodies()  # before the sender is forked, which then has them, too
    processes = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, processes, os.nice, (10,)) as sender,  # it would run on another machine
        tempfile.TemporaryDirectory(dir=DISK if DISK.is_dir() else None) as home,
        hop("ours", "--output", home, "--set", f"engine.context={CONTEXT}") as gateway,
    ):
        other, small_body = open_session(gateway.url), conversation(1, 2000, 100)[0]
        worst: dict[str, float] = {}
        alone_ms, during_ms, kept_mb, count = list[float](), list[float](), list[float](), 0
        for _ in range(_ROUNDS):
            alone_s, during_s = list[float](), list[float]()
            for name in bodies():
                small = open_session(gateway.url)  # a new one each time: what it records is not to count as memory
                alone, during = run_loop(watch(small, small_body, sender, other, name))
                delete_session(gateway.url, small)
                alone_s += alone
                during_s += during
                worst[name] = max(worst.get(name, 0.0), 1000 * max(during))
            alone_ms.append(p99_ms(alone_s))
            during_ms.append(p99_ms(during_s))
            count += len(during_s)
            kept_mb.append(resident_mb(gateway))
    added_ms = statistics.median(one - other for one, other in zip(during_ms, alone_ms, strict=True))
    slowest = max(worst, key=lambda name: worst[name])
    shown = ", ".join(f"{one:.0f}/{other:.0f}" for one, other in zip(during_ms, alone_ms, strict=True))
    return [
        Ratio(
            "bodies: added to the p99 of a small request while another session sends large ones",
            added_ms,
            50,
            "ms",
            detail=f"with/without in each round: {shown} ms; of {count} at most {worst[slowest]:.0f} ms ({slowest})",
        ),
        Ratio(
            f"bodies: memory that {len(bodies())} of them leave behind, each time",
            (kept_mb[-1] - kept_mb[0]) / (_ROUNDS - 1),
            20,
            "MB",
            detail=f"the gateway has {kept_mb[-1]:.0f} MB",
        ),
    ]


if __name__ == "__main__":
    print(*run(), sep="\n")
