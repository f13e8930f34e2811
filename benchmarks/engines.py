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
TokenCounts = dict[str, int]
"""How many tokens a peer generated, which may be fewer than requested."""


def make_prompts(count: int, engine: Engine) -> Prompts:
    """Questions that differ from their first token on, so that nothing is shared."""
    start, end = (engine.tokenizer.specials[name] for name in ("<|im_start|>", "<|im_end|>"))
    encode = engine.tokenizer.encode
    closing = [end, *encode("\n"), start, *encode("assistant\n")]
    return [
        [*encode(str(n)), start, *encode(f"user\nTell me a story about {n} bears and {n * 7} bees."), *closing]
        for n in range(100, 100 + count)
    ]


async def token_count(engine: Engine, prompts: Prompts) -> int:
    """How many tokens are generated for a burst."""

    async def one(ids: list[int], seed: str) -> int:
        sampling = Sampling(max_tokens=TOKENS)
        return sum([len(chunk.ids) async for chunk in engine.generate(ids, sampling, seed=seed)])

    return sum(await asyncio.gather(*(one(ids, str(n)) for n, ids in enumerate(prompts))))


def ours(engine: Engine, prompts: Prompts) -> None:
    if (counts := asyncio.run(token_count(engine, prompts))) != TOKENS * len(prompts):
        raise RuntimeError(f"{counts} tokens instead of {TOKENS} each")


def through_server(kind: str, url: str, prompts: Prompts, counts: TokenCounts) -> None:
    """The same burst by way of a server. It may stop early: `counts` gets the number of its tokens."""

    async def main() -> None:
        engine_class = engines.get(kind)
        engine = engine_class(
            engine_class.Config.model_validate({"type": kind, "url": url, "tokenizer": "smollm2"}), HOME
        )
        try:
            counts[kind] = await token_count(engine, prompts)
            if counts[kind] < TOKENS * len(prompts) / 2:
                raise RuntimeError(f"{counts[kind]} tokens instead of {TOKENS} each")
        finally:
            await engine.close()

    asyncio.run(main())


def theirs(model: Any, prompts: Prompts) -> None:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )
    if output.shape[1] != longest + TOKENS:
        raise RuntimeError(f"{output.shape[1] - longest} tokens instead of {TOKENS}")


def run() -> Iterator[Ratio]:
    """Bursts of 1, 8 and 32 requests, SmolLM2 in single precision; one server at a time, as each takes all cores."""
    from transformers import AutoModelForCausalLM

    from loopwright.engines.inprocess import smollm2

    engine = TransformersEngine(TransformersConfig(prefix_bytes=0), HOME)
    engine.batch.stop_ids = frozenset()  # so that all say as much as theirs
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")
    yield from against("generate()", engine, lambda prompts, _: theirs(model, prompts), 0.9)
    for kind, server, target in (
        ("vllm", servers.vllm, 0.75),
        ("llamacpp", partial(servers.llamacpp, max(BURSTS)), None),
    ):
        if problem := servers.missing(kind):
            print(f"engines: {problem}; measured without it", file=sys.stderr)
            continue
        print(f"engines: starting {kind}", file=sys.stderr)
        with server() as url:
            yield from against(kind, engine, partial(through_server, kind, url), target)


def against(
    peer: str, engine: Engine, work: Callable[[Prompts, TokenCounts], None], target: float | None
) -> Iterator[Ratio]:
    """Ours beside a peer, in turns. A burst of one is shown, and has to reach nothing."""
    for burst in BURSTS:
        prompts, counts = make_prompts(burst, engine), {peer: burst * TOKENS}
        taken_s = best_of(ROUNDS, {"ours": partial(ours, engine, prompts), peer: partial(work, prompts, counts)})
        rate, rival = burst * TOKENS / taken_s["ours"], counts[peer] / taken_s[peer]
        detail = f"{rate:.0f} and {rival:.0f} tokens/s"
        goal = target if burst > 1 else None
        yield Ratio(f"engines: a burst of {burst} against {peer}", rate / rival, goal, at_least=True, detail=detail)
