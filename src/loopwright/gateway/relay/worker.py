"""A worker: takes an engine to a gateway that it connects out to, and serves there until it is told to end."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from random import uniform
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, ClientWSTimeout, WSServerHandshakeError

from loopwright.core.errors import LoopwrightError
from loopwright.engines.base import ContextFull, Engine, EngineError, Sampling
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer, fingerprint
from loopwright.gateway.relay.link import LARGEST_BYTES, PROTOCOL, Link

log = logging.getLogger(__name__)
_Work = Callable[[Link, dict[str, Any]], Awaitable[None]]
_HEARTBEAT_S = 5.0
_FIRST_S, _LONGEST_S = 0.5, 30.0
_CONNECT_S = 20.0


class WorkerRefused(LoopwrightError, PermissionError):
    """The gateway will not have this worker, now or later."""


class RelayWorker:
    """Serves one engine to one gateway. A connection that is lost is made anew, a little later each time."""

    def __init__(
        self,
        engine: Engine,
        url: str,
        token: str,
        *,
        name: str | None = None,
        drain_s: float = 30.0,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.engine, self.url, self.drain_s = engine, url, drain_s
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._headers, self._say = {"authorization": f"Bearer {token}"}, say
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._ending = asyncio.Event()
        self._fingerprint = ""

    def end(self) -> None:
        """Take nothing new, finish what is begun, and leave."""
        self._ending.set()

    async def run(self) -> None:
        """Serve until `end`. WorkerRefused if the gateway does not want it."""
        self._fingerprint = await asyncio.to_thread(fingerprint, self.engine.tokenizer)
        delay_s = _FIRST_S
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S)) as http:
            while not self._ending.is_set():
                try:
                    if await self._connected(http):
                        delay_s = _FIRST_S
                    reason = "the connection ended"
                except WorkerRefused:
                    raise
                except WSServerHandshakeError as error:
                    if error.status in (401, 403, 404):
                        raise WorkerRefused(f"{self.url}: {_MEANING[error.status]}") from error
                    reason = f"it answered {error.status}"
                except (ClientError, OSError) as error:
                    reason = str(error) or type(error).__name__
                if self._ending.is_set():
                    return
                wait_s = uniform(delay_s / 2, delay_s)
                self._say(f"{self.url}: {reason}; trying again in {wait_s:.1f} s")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), wait_s)
                delay_s = min(_LONGEST_S, delay_s * 2)

    async def _connected(self, http: ClientSession) -> bool:
        """One connection, to its end; whether it came to serving."""
        async with http.ws_connect(
            self.url,
            headers=self._headers,
            heartbeat=_HEARTBEAT_S,
            max_msg_size=LARGEST_BYTES,
            timeout=ClientWSTimeout(ws_close=2.0),
        ) as wire:
            link = Link(wire)
            leaving: asyncio.Task[None] | None = None
            try:
                async with link.running():
                    await self._announced(link)
                    self._say(f"serving {self.url} as {self.name}")
                    leaving = asyncio.create_task(self._leave(link, wire))
                    while (message := await link.receive())["t"] != "refused":
                        self._obey(link, message)
                    raise self._refusal(message)
            except EngineError as error:
                if leaving is None:
                    raise
                log.info("the link ended: %s", error)
            finally:
                ending = [*self._streams.values(), *([] if leaving is None else [leaving])]
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)
        return leaving is not None

    async def _announced(self, link: Link) -> None:
        tokenizer = self.engine.tokenizer
        async with asyncio.timeout(_CONNECT_S):
            hello = await link.receive()
            told: dict[str, Any] = {"tokenizer": "bytes" if isinstance(tokenizer, ByteTokenizer) else "other"}
            if hello.get("tokenizer") is None and isinstance(tokenizer, HubTokenizer):
                told["tokenizer_json"] = tokenizer.as_text()
            config = self.engine.config
            link.send(
                "announce",
                protocol=PROTOCOL,
                name=self.name,
                model=f"{config.type}:{getattr(config, 'model', '')}",
                version=self.engine.version,
                fingerprint=self._fingerprint,
                **told,
            )
        async with asyncio.timeout(4 * _CONNECT_S):  # a tokenizer takes its time
            answer = await link.receive()
        if answer["t"] != "welcome":
            raise self._refusal(answer)

    def _refusal(self, answer: dict[str, Any]) -> WorkerRefused:
        return WorkerRefused(f"{self.url} refused this worker: {answer.get('reason')}")

    async def _leave(self, link: Link, wire: Any) -> None:
        """Once it is to end: what is begun gets its time, then the connection is closed."""
        await self._ending.wait()
        link.send("drain")
        if self._streams:
            self._say(f"ending {len(self._streams)} streams before leaving")
            await asyncio.wait(list(self._streams.values()), timeout=self.drain_s)
        await link.flushed()
        await wire.close()

    # -- what the gateway asks for ------------------------------------------------------------------------------

    def _obey(self, link: Link, message: dict[str, Any]) -> None:
        number = message.get("id", 0)
        if message["t"] == "cancel":
            if number in self._streams:
                self._streams[number].cancel()
            return
        work = self._generate if message["t"] == "generate" else self._do
        self._streams[number] = task = asyncio.create_task(self._answer(link, work, message))
        task.add_done_callback(lambda _: self._streams.pop(number, None))

    async def _answer(self, link: Link, work: _Work, message: dict[str, Any]) -> None:
        number = message.get("id", 0)
        try:
            await work(link, message)
        except ContextFull as error:
            link.send("failed", id=number, kind="context", limit=error.limit, length=error.length, reason=str(error))
        except (ValueError, KeyError) as error:
            link.send("failed", id=number, kind="invalid", reason=str(error))
        except EngineError as error:
            link.send("failed", id=number, kind="engine", reason=str(error))
        except Exception as error:
            log.exception("a request failed")
            link.send("failed", id=number, kind="engine", reason=f"{type(error).__name__}: {error}")

    async def _generate(self, link: Link, message: dict[str, Any]) -> None:
        sampling = Sampling.model_validate(message["sampling"])
        async with aclosing(self.engine.generate(message["ids"], sampling, seed=message["seed"])) as stream:
            async for chunk in stream:
                link.send(
                    "chunk",
                    id=message["id"],
                    ids=chunk.ids,
                    logprobs=chunk.logprobs,
                    version=chunk.version,
                    finish=chunk.finish,
                    tops=chunk.tops,
                )

    async def _do(self, link: Link, message: dict[str, Any]) -> None:
        engine = self.engine
        match message["t"]:
            case "pause":
                await engine.pause()
            case "resume":
                await engine.resume()
            case "load":
                await engine.load_weights(message["source"], message["version"])
            case "check":
                await engine.check()
            case other:
                raise EngineError(f"this worker does not know {other!r}")
        link.send("done", id=message["id"], version=engine.version)


_MEANING = {
    401: "the gateway does not know this token; give the one of its --token-file",
    403: "the gateway refuses this token",
    404: "nothing takes workers there; start the gateway with --relay, and connect to ws://…/ws/worker",
}
