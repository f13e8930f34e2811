"""Load: conversations as agents send them, and a client that costs next to nothing beside what it measures.

Each client keeps its connection and its conversation: every request repeats the conversation, and adds one turn.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

SAID = "".join(f"w{number:03d}" for number in range(199))
"""What the policy says in every turn: 199 tokens of the mock tokenizer, and an end."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def conversation(turns: int, first_bytes: int, delta_bytes: int, *, stream: bool = False) -> list[bytes]:
    """The bodies of this many requests; each adds the last answer and another message."""
    messages = [{"role": "system", "content": "s" * 2000}, {"role": "user", "content": "u" * 1000}]
    while len(orjson.dumps(messages)) < first_bytes:
        messages.append({"role": "assistant", "content": f"{len(messages)} {'a' * 800}"})
        messages.append({"role": "user", "content": f"{len(messages)} {'r' * 800}"})
    more = {"stream": True} if stream else {}
    bodies = []
    for turn in range(turns):
        bodies.append(orjson.dumps({"model": "policy", "messages": messages, "max_tokens": 1000, **more}))
        messages.append({"role": "assistant", "content": SAID})
        messages.append({"role": "user", "content": f"{turn} ".ljust(delta_bytes, "n")})
    return bodies


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client sends what it says."""

    url: str
    key: str

    def request(self, body: bytes) -> bytes:
        """A POST with this body."""
        parts = urlsplit(self.url)
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1",
            f"host: {parts.netloc}",
            f"authorization: Bearer {self.key}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        return "\r\n".join([*head, "\r\n"]).encode() + body

    async def connect(self) -> "Client":
        """A connection to there."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        _, client = await asyncio.get_running_loop().create_connection(Client, parts.hostname, parts.port)
        return client


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    _transport: Any

    def __init__(self) -> None:
        self._data, self._whole = bytearray(), 0
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._whole:
            head = self._data.find(b"\r\n\r\n")
            if head < 0:
                return
            match = _LENGTH.search(self._data, 0, head)
            self._whole = head + 4 + int(match[1]) if match else -1
        done = self._data.endswith(b"\r\n0\r\n\r\n") if self._whole < 0 else len(self._data) >= self._whole
        if done and self._answer is not None and not self._answer.done():
            answer, self._data, self._whole = bytes(self._data), bytearray(), 0
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server hung up"))

    async def ask(self, request: bytes) -> bytes:
        """What comes back; RuntimeError unless it is what the policy says."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        answer = await self._answer
        if not answer.startswith(b"HTTP/1.1 200") or (b"w198" not in answer):
            raise RuntimeError(f"no answer to expect: {answer[:500]!r}")
        return answer

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


async def talk(place: Place, bodies: Sequence[bytes]) -> list[float]:
    """Seconds of each request of one conversation."""
    client = await place.connect()
    requests, taken_s = [place.request(body) for body in bodies], []
    try:
        for request in requests:
            start_s = time.perf_counter()
            await client.ask(request)
            taken_s.append(time.perf_counter() - start_s)
    finally:
        client.close()
    return taken_s


async def crowd(places: Sequence[Place], bodies: Sequence[bytes]) -> float:
    """Requests per second of conversations at the same time; their first requests are over before the clock runs."""
    clients = [await place.connect() for place in places]

    async def each(client: Client, requests: Sequence[bytes]) -> None:
        for request in requests:
            await client.ask(request)

    async def all_of(bodies: Sequence[bytes]) -> float:
        requests = [[place.request(body) for body in bodies] for place in places]
        start_s = time.perf_counter()
        await asyncio.gather(*map(each, clients, requests))
        return time.perf_counter() - start_s

    try:
        await all_of(bodies[:1])
        return len(places) * (len(bodies) - 1) / await all_of(bodies[1:])
    finally:
        for client in clients:
            client.close()
