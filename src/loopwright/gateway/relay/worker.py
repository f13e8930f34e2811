"""A worker: connects to a gateway and serves an engine there until it is stopped."""

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
from loopwright.gateway.relay.link import MAX_MESSAGE_BYTES, PROTOCOL, Link

log = logging.getLogger(__name__)
_Work = Callable[[Link, dict[str, Any]], Awaitable[None]]
_HEARTBEAT_S = 5.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_CONNECT_S = 20.0


class WorkerRefused(LoopwrightError, PermissionError):
    """The gateway does not accept this worker, and trying again is pointless."""


class RelayWorker:
    """Serves one engine at one gateway. It reconnects after a lost connection, with a growing delay."""

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
        self._stopping = asyncio.Event()
        self._fingerprint = ""

    def stop(self) -> None:
        """Accept no new work, finish what is running, and disconnect."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`. WorkerRefused if the gateway does not accept it."""
        self._fingerprint = await asyncio.to_thread(fingerprint, self.engine.tokenizer)
        delay_s = _FIRST_DELAY_S
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S)) as http:
            while not self._stopping.is_set():
                try:
                    if await self._connect(http):
                        delay_s = _FIRST_DELAY_S
                    reason = "the connection ended"
                except WorkerRefused:
                    raise
                except WSServerHandshakeError as error:
                    if error.status in (401, 403, 404):
                        raise WorkerRefused(f"{self.url}: {_REFUSALS[error.status]}") from error
                    reason = f"it responded {error.status}"
                except (ClientError, OSError) as error:
                    reason = str(error) or type(error).__name__
                if self._stopping.is_set():
                    return
                wait_s = uniform(delay_s / 2, delay_s)
                self._say(f"{self.url}: {reason}; reconnecting in {wait_s:.1f} s")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)
                delay_s = min(_MAX_DELAY_S, delay_s * 2)

    async def _connect(self, http: ClientSession) -> bool:
        """Serve over one connection until it ends; whether it was accepted."""
        async with http.ws_connect(
            self.url,
            headers=self._headers,
            heartbeat=_HEARTBEAT_S,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=ClientWSTimeout(ws_close=2.0),
        ) as wire:
            link = Link(wire)
            leaving: asyncio.Task[None] | None = None
            try:
                async with link.running():
                    await self._announce(link)
                    self._say(f"serving {self.url} as {self.name}")
                    leaving = asyncio.create_task(self._leave(link, wire))
                    while (message := await link.receive())["t"] != "refused":
                        self._handle(link, message)
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

    async def _announce(self, link: Link) -> None:
        tokenizer = self.engine.tokenizer
        async with asyncio.timeout(_CONNECT_S):
            hello = await link.receive()
            tokenizer_fields: dict[str, Any] = {
                "tokenizer": "bytes" if isinstance(tokenizer, ByteTokenizer) else "other"
            }
            if hello.get("tokenizer") is None and isinstance(tokenizer, HubTokenizer):
                tokenizer_fields["tokenizer_json"] = tokenizer.as_text()
                if tokenizer.chat_template is not None:
                    tokenizer_fields["chat_template"] = tokenizer.chat_template.as_json()
            config = self.engine.config
            link.send(
                "announce",
                protocol=PROTOCOL,
                name=self.name,
                model=f"{config.type}:{getattr(config, 'model', '')}",
                version=self.engine.version,
                steering=sorted(self.engine.steering),
                fingerprint=self._fingerprint,
                **tokenizer_fields,
            )
        async with asyncio.timeout(4 * _CONNECT_S):  # a tokenizer is large
            answer = await link.receive()
        if answer["t"] != "welcome":
            raise self._refusal(answer)

    def _refusal(self, answer: dict[str, Any]) -> WorkerRefused:
        return WorkerRefused(f"{self.url} refused this worker: {answer.get('reason')}")

    async def _leave(self, link: Link, wire: Any) -> None:
        """When it is stopped: let running streams end, then close the connection."""
        await self._stopping.wait()
        link.send("drain")
        if self._streams:
            self._say(f"finishing {len(self._streams)} streams before disconnecting")
            await asyncio.wait(list(self._streams.values()), timeout=self.drain_s)
        await link.flush()
        await wire.close()

    # -- messages of the gateway --------------------------------------------------------------------------------

    def _handle(self, link: Link, message: dict[str, Any]) -> None:
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
        self.engine.check_sampling(sampling)
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
                    **({"cached_tokens": chunk.cached_tokens} if chunk.cached_tokens else {}),
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
                raise EngineError(f"unknown message type {other!r}")
        link.send("done", id=message["id"], version=engine.version)


_REFUSALS = {
    401: "the gateway does not accept this token; use the one of its --token-file",
    403: "the gateway refuses this token",
    404: "the gateway accepts no workers there; start it with --relay, and connect to ws://…/ws/worker",
}
