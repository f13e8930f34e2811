"""A session with an engine that follows a plan."""

import asyncio
from pathlib import Path

from loopwright.core.task import Task
from loopwright.engines.base import Chunk, Engine, EngineConfig, Sampling
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.session import Session

TASK = Task("t", ({"role": "user", "content": "hi"},))
END = 257
TOOLS = [[], [{"type": "function", "function": {"name": "add"}}], [{"type": "function", "function": {"name": "sub"}}]]


class PlannedEngine(Engine):
    """Samples its plans: texts, chunks, exceptions, and `...` to hang."""

    def __init__(self, *plans):
        super().__init__(EngineConfig(type="parrot"), Path())
        self.tokenizer = ByteTokenizer()
        self.plans, self.calls, self.closed = list(plans), [], 0

    async def generate(self, ids, sampling, *, seed):
        sampled = []
        self.calls.append((tuple(ids), sampled))
        plan = self.plans.pop(0)
        try:
            for step in self.chunks(plan, sampling) if isinstance(plan, str) else plan:
                if isinstance(step, Exception):
                    raise step
                if step is ...:
                    await asyncio.Event().wait()
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                sampled += step.ids
                yield step
        finally:
            self.closed += 1

    def chunks(self, text, sampling):
        ids = (*self.tokenizer.encode(text), END)[: sampling.max_tokens]
        finish = "stop" if ids[-1] == END else "length"
        return (
            [chunk_of(*ids[:2]), chunk_of(*ids[2:], finish=finish)] if len(ids) > 2 else [chunk_of(*ids, finish=finish)]
        )

    async def pause(self): ...

    async def resume(self): ...


def chunk_of(*ids, version=0, finish=None):
    return Chunk(ids, (-0.25,) * len(ids), version, finish)


def user(text):
    return {"role": "user", "content": text}


def session_of(engine, **options):
    return Session(engine, options.pop("sampling", Sampling(max_tokens=10_000)), seed="0", **options)


def run(scenario, *plans, **options):
    async def main():
        engine = PlannedEngine(*plans)
        session = session_of(engine, **options)
        result = await asyncio.wait_for(scenario(session, engine), 30)
        check(session.episode(TASK), engine)
        return result

    return asyncio.run(main())


def check(episode, engine):
    """T02 and T03: each stream is a path of the episode, and each sampled token is exported once."""
    paths = [tuple(token for i in path for token in episode.nodes[i].ids) for path in episode.branches()]
    for ids, sampled in engine.calls:
        whole = (*ids, *sampled)
        assert any(path[: len(whole)] == whole for path in paths)
    assert sum(len(sampled) for _, sampled in engine.calls) == episode.sampled
    rows = episode.rows(with_abandoned=True)
    assert sum(sum(row.response_mask) for row in rows) == episode.sampled
    trained = [i for row in rows for i, mark in zip(row.response_ids, row.response_mask, strict=True) if mark]
    assert sorted(trained) == sorted(token for _, sampled in engine.calls for token in sampled)
