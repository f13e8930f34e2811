"""Large request bodies: how long another session waits while one session sends them, and what they leave behind.

One session sends the largest bodies that the gateway accepts, most of which it refuses; another one sends small
requests all the time. What a small request takes is compared with the time it takes when nobody else is there.
"""

import asyncio
import http.client
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
_ROUNDS = 3
_PAUSE_S = 0.005
_WORDS = " ".join(f"def f{number}(self, value): return {number} * value" for number in range(50_000))


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


def send(place: Place, path: str, body: bytes) -> int:
    """The status of the response."""
    parts = urlsplit(place.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    with suppress(BrokenPipeError):  # refused before all of it was sent
        connection.request("POST", f"{parts.path}/{path}", body, {"authorization": f"Bearer {place.key}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


async def watch(
    place: Place, requests: Sequence[bytes], attack: Mapping[str, tuple[str, bytes]], other: Place
) -> list[float]:
    """Seconds that each small request took while the bodies were sent, one after another."""
    client, taken_s = await place.connect(), list[float]()

    def send_all() -> None:
        for name, (path, body) in attack.items():
            if (status := send(other, path, body)) >= 500:
                raise RuntimeError(f"{name}: status {status}")

    sending = asyncio.ensure_future(asyncio.to_thread(send_all) if attack else asyncio.sleep(2))
    number = 0
    while not sending.done():
        start_s = time.perf_counter()
        await client.ask(requests[number % len(requests)])
        taken_s.append(time.perf_counter() - start_s)
        number += 1
        await asyncio.sleep(_PAUSE_S)
    client.close()
    await sending
    return taken_s


def resident_mb(gateway: Hop) -> float:
    """Memory of the gateway's own process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def run() -> list[Ratio]:
    """Latency, and memory that is kept."""
    with tempfile.TemporaryDirectory(dir=DISK if DISK.is_dir() else None) as home:
        settings = ["--output", home, "--set", f"engine.context={CONTEXT}"]
        with hop("ours", *settings) as gateway:
            small, other = open_session(gateway.url), open_session(gateway.url)
            requests = [small.request(body) for body in conversation(1, 2000, 100)]
            attack = bodies()
            alone_s = run_loop(watch(small, requests, {}, other))
            worst: dict[str, float] = {}
            taken_s, kept_mb = list[float](), list[float]()
            for _ in range(_ROUNDS):
                for name, body in attack.items():
                    during_s = run_loop(watch(small, requests, {name: body}, other))
                    taken_s += during_s
                    worst[name] = max(worst.get(name, 0.0), 1000 * max(during_s))
                kept_mb.append(resident_mb(gateway))
    p99_ms = 1000 * statistics.quantiles(taken_s, n=100)[98]
    alone_ms = 1000 * statistics.quantiles(alone_s, n=100)[98]
    slowest = max(worst, key=lambda name: worst[name])
    return [
        Ratio(
            "bodies: p99 of a small request while another session sends large ones",
            p99_ms,
            50,
            "ms",
            detail=f"{alone_ms:.1f} ms alone; of {len(taken_s)} at most {worst[slowest]:.0f} ms ({slowest})",
        ),
        Ratio(
            f"bodies: memory that {len(attack)} of them leave behind, each time",
            (kept_mb[-1] - kept_mb[0]) / (_ROUNDS - 1),
            20,
            "MB",
            detail=f"the gateway has {kept_mb[-1]:.0f} MB",
        ),
    ]


if __name__ == "__main__":
    print(*run(), sep="\n")
