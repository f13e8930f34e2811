"""Hops between an agent and its engine, each in a separate process: none, a bare one, LiteLLM's, and ours.

`python -m benchmarks.hops NAME …` serves one until it is terminated.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import aiohttp
import orjson
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
from aiohttp import web

from benchmarks.load import SAID
from loopwright.cli.gateway import app
from loopwright.core.runtime import run
from loopwright.engines.base import Chunk, Engine, EngineConfig, Sampling, engines
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.shortcuts import SHORTCUTS
from loopwright.engines.tokenizer import HubTokenizer, Tokenizer

LITELLM = "litellm[proxy]==1.106.2"
_HOME = Path(__file__).resolve().parent.parent / ".venvs" / "litellm"
_BLOCK = 10
_EVENTS = {"content-type": "text/event-stream"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Quads:
    """A tokenizer whose tokens are four bytes each: quick, exact, and as many to a page as a real one makes."""

    specials: Mapping[str, int] = {"<|im_start|>": 2**33, "<|im_end|>": 2**33 + 1}
    size = 2**33 + 2
    chat_template = ChatTemplateSource(  # SmolLM2's, except for its system message
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )

    def __init__(self) -> None:
        self._names = {number: name.encode() for name, number in self.specials.items()}

    def encode(self, text: str) -> list[int]:
        """Four bytes to a token; those at the end that make no four are tokens each."""
        data = text.encode("utf-8", "replace")
        whole = len(data) & ~3
        return [*memoryview(data[:whole]).cast("I"), *(2**32 + byte for byte in data[whole:])]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        tokens = list(ids)
        try:
            return array("I", tokens).tobytes().decode("utf-8", "replace")
        except OverflowError:  # some are no four bytes
            return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each stands for."""
        return [self.bytes_of(token).decode("utf-8", "replace") for token in ids]

    def bytes_of(self, token: int) -> bytes:
        """Four bytes, one, or a special token's name."""
        if token < 2**32:
            return token.to_bytes(4, sys.byteorder)
        return self._names.get(token) or bytes((token - 2**32,))


def byte_pairs() -> HubTokenizer:
    """A byte-level BPE tokenizer, trained on the standard library's source: as slow as those of real models."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted(Path(os.__file__).parent.glob("*.py"))[:60]], trainer)
    return HubTokenizer(tokenizer)


class MockConfig(EngineConfig):
    """An engine that takes no time."""

    type: Literal["mock"] = "mock"
    block: int = 200
    """Tokens that come at once."""
    context: int | None = None
    """Tokens of its context; with a limit, its tokenizer is one as real models have, which takes its time."""


class MockEngine(Engine):
    """Says 200 tokens, each with a logprob."""

    Config: ClassVar[type[EngineConfig]] = MockConfig

    def __init__(self, config: MockConfig, home: Path) -> None:
        super().__init__(config, home)
        self.tokenizer: Tokenizer = Quads() if config.context is None else byte_pairs()
        self.max_context = config.context
        ids = (*self.tokenizer.encode(SAID), self.tokenizer.specials["<|im_end|>"])
        logprobs = tuple(-number / 300 for number in range(len(ids)))
        block = config.block
        last = len(ids) - block
        self._chunks = [
            Chunk(ids[at : at + block], logprobs[at : at + block], 0, "stop" if at >= last else None)
            for at in range(0, len(ids), block)
        ]

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        for chunk in self._chunks:
            yield chunk
            if chunk.finish is None:
                await asyncio.sleep(0)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


# -- what each process does -------------------------------------------------------------------------------------------


async def direct() -> None:
    """Answers with a chat completion as ours is, whole or in 20 events."""
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy"}
    message = {"role": "assistant", "content": SAID, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 8000, "completion_tokens": 200, "total_tokens": 8200}
    whole = orjson.dumps({**head, "choices": [choice], "usage": usage})
    events = []
    for at in range(0, len(SAID), 4 * _BLOCK):
        delta = {"index": 0, "delta": {"content": SAID[at : at + 4 * _BLOCK]}, "finish_reason": None}
        events.append(b"data: %b\n\n" % orjson.dumps({**head, "object": "chat.completion.chunk", "choices": [delta]}))

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if not body.endswith(b'"stream":true}'):
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    await _serve(answer)


async def raw(upstream: str) -> None:
    """Hands on what it gets, and what comes back."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as client:

        async def answer(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"content-type": "application/json", "authorization": request.headers["authorization"]}
            async with client.post(upstream + request.path, data=body, headers=headers) as upstream_response:
                if upstream_response.headers.get("content-type") != "text/event-stream":
                    return web.Response(
                        body=await upstream_response.read(),
                        status=upstream_response.status,
                        content_type=upstream_response.content_type,
                    )
                response = web.StreamResponse(headers=_EVENTS)
                await response.prepare(request)
                async for data in upstream_response.content.iter_any():
                    await response.write(data)
                return response

        await _serve(answer)


async def _serve(answer: Handler) -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"serving at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def ours(*options: str) -> None:
    """`loopwright gateway serve`, with an engine that takes no time."""
    engines.add("mock", MockEngine)
    SHORTCUTS["mock"] = MockConfig
    app(["serve", "--engine", "mock", "--port", "0", *options])


# -- starting and ending them -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hop:
    """A process that serves."""

    url: str
    process: subprocess.Popen[str]
    key: str = "sk-none"

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def hop(name: str, *options: str) -> Iterator[Hop]:
    """One of ours, while it is needed."""
    command = [sys.executable, "-m", "benchmarks.hops", name, *options]
    with _running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if (url := re.search(r"http://[\d.:]+", line)) is None:
            raise RuntimeError(f"{name} does not serve: {line}")
        yield Hop(url[0], process)


@contextmanager
def litellm(upstream: str, directory: Path) -> Iterator[Hop | None]:
    """LiteLLM's proxy in its own virtual environment, created on first use; None if that fails."""
    program = _HOME / "bin" / "litellm"
    if not program.exists():
        print(f"installing {LITELLM} into {_HOME}, which takes a minute", flush=True)
        failed = subprocess.run([sys.executable, "-m", "venv", str(_HOME)], check=False).returncode
        if failed or subprocess.run([_HOME / "bin" / "pip", "install", "-qq", LITELLM], check=False).returncode:
            print(f"{LITELLM} cannot be installed: measured without it", flush=True)
            yield None
            return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    params = {"model": "openai/policy", "api_base": f"{upstream}/v1", "api_key": "sk-none"}
    (directory / "litellm.json").write_text(
        json.dumps({"model_list": [{"model_name": "policy", "litellm_params": params}]})
    )
    command = [str(program), "--config", str(directory / "litellm.json"), "--host", "127.0.0.1", "--port", str(port)]
    # Its prices are those it came with: it is not to ask the network for newer ones.
    key = f"sk-{secrets.token_hex(32)}"
    settings = {**os.environ, "LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    with (
        (directory / "litellm.log").open("w") as log,
        _running(command, stdout=log, stderr=log, env=settings) as process,
    ):
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness"):
                break
            if process.poll() is not None:
                raise RuntimeError(f"LiteLLM does not serve: {(directory / 'litellm.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield Hop(f"http://127.0.0.1:{port}", process, key)


@contextmanager
def _running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


if __name__ == "__main__":
    match sys.argv[1]:
        case "direct":
            run(direct())
        case "raw":
            run(raw(sys.argv[2]))
        case _:
            ours(*sys.argv[2:])
