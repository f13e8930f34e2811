"""Engines: tokens per second on a burst of requests, against `model.generate` on the same batch and real servers."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.measure import Ratio, best_of
from loopwright.engines.base import Engine, Sampling, engines
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine

TOKENS = 64
BURSTS = (1, 8, 32)
ROUNDS = 2
HOME = Path(__file__).parent
Prompts = list[list[int]]
Said = dict[str, int]
"""How many tokens a peer said, where it may be fewer than were asked for."""


def prompts(count: int, engine: Engine) -> Prompts:
    """Questions that differ from their first token on, so that nothing is shared."""
    start, end = (engine.tokenizer.specials[name] for name in ("<|im_start|>", "<|im_end|>"))
    encode = engine.tokenizer.encode
    closing = [end, *encode("\n"), start, *encode("assistant\n")]
    return [
        [*encode(str(n)), start, *encode(f"user\nTell me a story about {n} bears and {n * 7} bees."), *closing]
        for n in range(100, 100 + count)
    ]


async def said_by(engine: Engine, asked: Prompts) -> int:
    """How many tokens are said in answer to a burst."""

    async def one(ids: list[int], seed: str) -> int:
        sampling = Sampling(max_tokens=TOKENS)
        return sum([len(chunk.ids) async for chunk in engine.generate(ids, sampling, seed=seed)])

    return sum(await asyncio.gather(*(one(ids, str(n)) for n, ids in enumerate(asked))))


def ours(engine: Engine, asked: Prompts) -> None:
    if (said := asyncio.run(said_by(engine, asked))) != TOKENS * len(asked):
        raise RuntimeError(f"{said} tokens instead of {TOKENS} each")


def served(kind: str, url: str, asked: Prompts, said: Said) -> None:
    """The same burst by way of a server. An end of turn may cost it some tokens: as many as it `said` count."""

    async def main() -> None:
        made = engines.get(kind)
        engine = made(made.Config.model_validate({"type": kind, "url": url, "tokenizer": "smollm2"}), HOME)
        try:
            said[kind] = await said_by(engine, asked)
            if said[kind] < TOKENS * len(asked) / 2:
                raise RuntimeError(f"{said[kind]} tokens instead of {TOKENS} each")
        finally:
            await engine.close()

    asyncio.run(main())


def theirs(model: Any, asked: Prompts) -> None:
    import torch

    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in asked])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )
    if found.shape[1] != longest + TOKENS:
        raise RuntimeError(f"{found.shape[1] - longest} tokens instead of {TOKENS}")


def run() -> Iterator[Ratio]:
    """Bursts of 1, 8 and 32 requests, SmolLM2 in single precision; one server at a time, as each takes all cores."""
    from transformers import AutoModelForCausalLM

    from loopwright.engines.inprocess import smollm2

    engine = TransformersEngine(TransformersConfig(prefix_bytes=0), HOME)
    engine.batch.stop_ids = frozenset()  # so that all say as much as theirs
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")
    yield from against("generate()", engine, lambda asked, _: theirs(model, asked), 0.9)
    for kind, server, target in (
        ("vllm", servers.vllm, 0.75),
        ("llamacpp", partial(servers.llamacpp, max(BURSTS)), None),
    ):
        if problem := servers.missing(kind):
            print(f"engines: {problem}; measured without it", file=sys.stderr)
            continue
        print(f"engines: starting {kind}", file=sys.stderr)
        with server() as url:
            yield from against(kind, engine, partial(served, kind, url), target)


def against(peer: str, engine: Engine, work: Callable[[Prompts, Said], None], target: float | None) -> Iterator[Ratio]:
    """Ours beside a peer, in turns. A burst of one is shown, and has to reach nothing."""
    for burst in BURSTS:
        asked, said = prompts(burst, engine), {peer: burst * TOKENS}
        taken_s = best_of(ROUNDS, {"ours": partial(ours, engine, asked), peer: partial(work, asked, said)})
        rate, rival = burst * TOKENS / taken_s["ours"], said[peer] / taken_s[peer]
        detail = f"{rate:.0f} and {rival:.0f} tokens/s"
        goal = target if burst > 1 else None
        yield Ratio(f"engines: a burst of {burst} against {peer}", rate / rival, goal, at_least=True, detail=detail)
