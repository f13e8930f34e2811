"""The body worker: a process that parses and tokenises large request bodies, so that no other session waits for them.

A thread would not do: parsers and tokenisers hold the interpreter lock. The process is started for the first large
body, and again when it has died. It handles one body at a time.
"""

import asyncio
import logging
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import TYPE_CHECKING

from loopwright.engines.base import ContextFull
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer
from loopwright.gateway.dialects.base import Dialect
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.body_worker_main import HEADER, BodyJob, BodyRefusal, PreparedBody, RenderSettings
from loopwright.gateway.sessions.served_session import ServedSession

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
LARGE_BYTES = 2**16
"""Bodies with more new bytes than this go to the worker. Smaller ones are parsed and tokenised in milliseconds."""
_COMMAND = (sys.executable, "-P", "-c", "from loopwright.gateway.server.body_worker_main import main; main()")
_TIMEOUT_S = 120.0
_TRIES = 2


class BodyWorker:
    """The parent's side."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._process: Process | None = None
        self._tokenizer: bytes | None = None
        """Pickled."""
        self._lock = asyncio.Lock()
        self._exchanges: set[asyncio.Task[PreparedBody | BodyRefusal]] = set()

    async def prepare(self, session: ServedSession, dialect: Dialect, body: bytes) -> PreparedBody:
        """The content of a body. BadRequest, ContextFull or Refusal if it cannot be served."""
        engine, limits = session.session.engine, session.session.limits
        if not isinstance(engine.tokenizer, ByteTokenizer | HubTokenizer):  # another process may not have its code
            content, digest = dialect.bodies.read(body)
            return PreparedBody(content, digest, dialect.bodies.start)
        job = BodyJob(type(dialect), dialect.defaults, engine.max_context, limits.recorded)
        # A client that leaves must not interrupt it: the next body would get this one's response.
        exchange = asyncio.ensure_future(self._exchange(job, body))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._on_done)
        reply = await asyncio.shield(exchange)
        if isinstance(reply, PreparedBody):
            return reply
        match reply.kind:
            case "invalid":
                raise BadRequest(reply.message, reply.param)
            case "context":
                raise ContextFull(reply.limit, reply.length)
            case "too_large":
                raise Refusal(413, "too_large", reply.message, retry=False)
        log.error("the body worker failed: %s", reply.message)
        raise Refusal(413, "too_large", f"a request of {len(body)} bytes could not be processed", retry=False)

    def _on_done(self, exchange: "asyncio.Task[PreparedBody | BodyRefusal]") -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # raised to the request, if its client is still there

    async def _exchange(self, job: BodyJob, body: bytes) -> PreparedBody | BodyRefusal:
        async with self._lock:
            for _ in range(_TRIES):
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        process = await self._start()
                        return await _send(process, job, body)
                except TimeoutError:
                    await self._end()
                    return BodyRefusal("failed", f"no response within {_TIMEOUT_S:g} s")
                except (OSError, asyncio.IncompleteReadError):  # it has ended, perhaps after the body before
                    await self._end()
                except BaseException:
                    await self._end()
                    raise
        return BodyRefusal("failed", f"it died twice over a body of {len(body)} bytes")

    async def _start(self) -> Process:
        if self._process is None:
            gateway = self._gateway
            engine, template = gateway.engine, gateway.config.template
            if template == "auto":
                template = getattr(engine.config, "template", "auto")
            reasoning = gateway.config.reasoning or getattr(engine.config, "reasoning", None)
            thinks = getattr(engine.config, "thinks", None) if gateway.config.thinks is None else gateway.config.thinks
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(pickle.dumps, engine.tokenizer)
            description = pickle.dumps(RenderSettings(self._tokenizer, template, reasoning, thinks))
            # In a session of its own: Ctrl-C is for the gateway, which closes the pipes when it has stopped.
            process = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=2**20
            )
            self._process = process
            assert process.stdin is not None  # noqa: S101  it is a pipe
            process.stdin.write(HEADER.pack(len(description), 0) + description)
        return self._process

    async def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """End the process."""
        for exchange in list(self._exchanges):
            exchange.cancel()
        if self._exchanges:
            await asyncio.wait(self._exchanges)
        await self._end()


async def _send(process: Process, job: BodyJob, body: bytes) -> PreparedBody | BodyRefusal:
    requests, responses = process.stdin, process.stdout
    assert requests is not None and responses is not None  # noqa: S101, PT018  both are pipes
    description = pickle.dumps(job)
    requests.write(HEADER.pack(len(description), len(body)) + description)
    requests.write(body)
    await requests.drain()
    size, _ = HEADER.unpack(await responses.readexactly(HEADER.size))
    reply: PreparedBody | BodyRefusal = pickle.loads(await responses.readexactly(size))  # noqa: S301  our own child
    return reply
