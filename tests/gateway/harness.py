"""A gateway with an engine that gives planned replies, a token at a time."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import openai

from loopwright.engines.base import Chunk, ContextFull, Engine, EngineConfig, EngineError
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.gateway import Gateway, GatewayConfig

END = 257
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def call(name="add", **arguments):
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Replier(Engine):
    """Samples `says(prompt)`, a token per chunk; waits for `go` after `hold_at` tokens and fails after `fail_at`."""

    def __init__(self, says="hello", *, hold_at=None, fail_at=None, room=None):
        super().__init__(EngineConfig(type="teller"), Path())
        self.tokenizer = ByteTokenizer()
        self.says = says if callable(says) else lambda prompt: says
        self.hold_at, self.fail_at, self.room = hold_at, fail_at, room
        self.calls, self.running, self.closed = [], 0, 0
        self.go, self.held, self.before = asyncio.Event(), asyncio.Event(), lambda: None

    async def generate(self, ids, sampling, *, seed):
        self.before()
        if self.room is not None and len(ids) >= self.room:
            raise ContextFull(self.room, len(ids))
        sampled = []
        self.calls.append((tuple(ids), sampled, sampling, seed))
        text = self.tokenizer.decode(ids)
        start = text.rfind("<|im_start|>assistant\n")
        prompt, reply = (text, "") if start < 0 else (text[:start], text[start + len("<|im_start|>assistant\n") :])
        tokens = [*self.tokenizer.encode(self.says(prompt)), END][len(self.tokenizer.encode(reply)) :]
        self.running += 1
        try:
            for token in tokens[: sampling.max_tokens]:
                await asyncio.sleep(0)
                if self.hold_at is not None and len(sampled) == self.hold_at:
                    self.held.set()
                    await self.go.wait()
                if self.fail_at is not None and len(sampled) == self.fail_at:
                    self.fail_at = None
                    raise EngineError("out of memory")
                sampled.append(token)
                last = token == tokens[-1]
                full = len(sampled) == sampling.max_tokens
                yield Chunk((token,), (-0.5,), self.version, "stop" if last else "length" if full else None)
        finally:
            self.running -= 1
            self.closed += 1

    async def pause(self): ...

    async def resume(self): ...


@asynccontextmanager
async def serve(engine=None, output=None, token=None, clock=None, **config):
    more = {} if clock is None else {"clock": clock}
    async with Gateway(
        Replier() if engine is None else engine, GatewayConfig(**config), output=output, token=token, **more
    ) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(session, **options):
    options = {"base_url": session.openai_base_url, "api_key": session.key, "max_retries": 0, **options}
    async with openai.AsyncOpenAI(**options) as client:
        yield client


@asynccontextmanager
async def claude_of(session, **options):
    options = {"base_url": session.anthropic_base_url, "api_key": session.key, "max_retries": 0, **options}
    async with anthropic.AsyncAnthropic(**options) as client:
        yield client


def user(text):
    return {"role": "user", "content": text}


def run(body):
    return asyncio.run(asyncio.wait_for(body(), 60))


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
