"""Shared by the dialect tests: an engine with planned replies, and a gateway that serves it."""

import asyncio
from pathlib import Path

import orjson
from hypothesis import strategies as st

from loopwright.engines.base import Chunk, Engine, EngineConfig, EngineError, Sampling
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.gateway import Gateway, GatewayConfig
from loopwright.gateway.sessions.session import Session

END = 257
DEFAULTS = Sampling(max_tokens=4096)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
"""What a body may hold."""


class Parrot(Engine):
    """Samples the next planned reply, a few tokens at a time; a plan may end with an exception."""

    def __init__(self, *plans):
        super().__init__(EngineConfig(type="parrot"), Path())
        self.tokenizer = ByteTokenizer()
        self.plans, self.prompts = list(plans), []
        self.gate = None  # an event that everything after the first tokens waits for

    async def generate(self, ids, sampling, *, seed):
        self.prompts.append(tuple(ids))
        plan = self.plans.pop(0)
        text, failure = plan if isinstance(plan, tuple) else (plan, None)
        remaining = ([*self.tokenizer.encode(text)] + ([] if failure else [END]))[: sampling.max_tokens]
        while remaining:
            await asyncio.sleep(0)
            now, remaining = remaining[:3], remaining[3:]
            finish = None if remaining or failure else "stop" if now[-1] == END else "length"
            yield Chunk(tuple(now), (-0.25,) * len(now), 0, finish)
            if self.gate is not None:
                await self.gate.wait()
        if failure:
            raise failure

    async def pause(self): ...

    async def resume(self): ...


def run(steps, *plans):
    """Run `steps` with a session of a gateway; returns its result, the session and the engine."""

    async def main():
        engine = Parrot(*plans)
        async with Gateway(engine, GatewayConfig(keepalive_s=0.05)) as gateway:
            session = await gateway.open()
            result = await asyncio.wait_for(steps(session, engine), 60)
            return result, session.served.session, engine

    return asyncio.run(main())


def exact(session):
    """The exactness of each turn."""
    return [str(verdict.kind) for verdict in session.verdicts.values()]


def read_events(stream):
    """Server-sent events as names and data."""
    events = []
    for block in stream.decode().strip().split("\n\n"):
        if not block.startswith(":"):
            head, data = block.split("\n")
            events.append((head.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return events


def stream_events(dialect, body, reply, *, fail=None):
    """The events of a turn with this reply, without a server: begin, pieces, and the end or a failure."""

    async def main():
        session = Session(Parrot((reply, fail) if fail else reply), DEFAULTS, seed="0")
        ask = dialect.parse({**body, "stream": True})
        writer, pieces = dialect.stream(ask, "7"), []
        draft = session.draft(ask.messages, ask.tools, sampling=ask.sampling.model_copy(update={"stop": ask.stop}))
        stream = writer.begin(len(draft.prompt))
        try:
            turn = await session.sample(draft, pieces.append)
        except EngineError as error:
            stream += b"".join(writer.delta(0, piece) for piece in pieces)
            return read_events(stream + writer.fail(str(error), kind="engine")), None
        stream += b"".join(writer.delta(0, piece) for piece in pieces) + writer.end([turn])
        return read_events(stream), dialect.render(ask, "7", [turn])

    return asyncio.run(main())
