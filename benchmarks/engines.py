"""Engines: tokens per second on a burst of requests, against `model.generate` on the same batch and real servers."""

import asyncio
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.measure import Ratio, best_of
from loopwright.engines.base import Engine, Sampling, engines
from loopwright.engines.inprocess import TransformersConfig, TransformersEngine

TOKENS = 64
BURSTS = (1, 8, 32)
HOME = Path(__file__).parent


def prompts(count: int, engine: Engine) -> list[list[int]]:
    """Questions that differ from their first token on, so that nothing is shared."""
    start, end = (engine.tokenizer.specials[name] for name in ("<|im_start|>", "<|im_end|>"))
    encode = engine.tokenizer.encode
    closing = [end, *encode("\n"), start, *encode("assistant\n")]
    return [
        [*encode(str(n)), start, *encode(f"user\nTell me a story about {n} bears and {n * 7} bees."), *closing]
        for n in range(100, 100 + count)
    ]


async def said_by(engine: Engine, asked: list[list[int]]) -> int:
    """How many tokens are said in answer to a burst."""

    async def one(ids: list[int], seed: str) -> int:
        sampling = Sampling(max_tokens=TOKENS)
        return sum([len(chunk.ids) async for chunk in engine.generate(ids, sampling, seed=seed)])

    return sum(await asyncio.gather(*(one(ids, str(n)) for n, ids in enumerate(asked))))


def ours(engine: Engine, asked: list[list[int]]) -> None:
    if (said := asyncio.run(said_by(engine, asked))) != TOKENS * len(asked):
        raise RuntimeError(f"{said} tokens instead of {TOKENS} each")


def served(kind: str, url: str, asked: list[list[int]], said: dict[str, int]) -> None:
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


def theirs(model: Any, asked: list[list[int]]) -> None:
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


def run() -> list[Ratio]:
    """Bursts of 1, 8 and 32 requests, with SmolLM2 in single precision."""
    from transformers import AutoModelForCausalLM

    from loopwright.engines import smollm2

    engine = TransformersEngine(TransformersConfig(prefix_bytes=0), HOME)
    engine.batch.stop_ids = frozenset()  # so that all say as much as theirs
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")
    found = []
    with ExitStack() as running:
        urls = {}
        for kind in ("vllm", "llamacpp"):
            if problem := servers.missing(kind):
                print(f"engines: {problem}; measured without it", file=sys.stderr)
                continue
            urls[kind] = running.enter_context(servers.vllm() if kind == "vllm" else servers.llamacpp(max(BURSTS)))
        for burst in BURSTS:
            asked = prompts(burst, engine)
            works = {"ours": partial(ours, engine, asked), "generate()": partial(theirs, model, asked)}
            said: dict[str, int] = {}
            works |= {kind: partial(served, kind, url, asked, said) for kind, url in urls.items()}
            rates = {who: said.get(who, burst * TOKENS) / taken for who, taken in best_of(3, works).items()}
            detail = ", ".join(f"{who} {rate:.0f}" for who, rate in rates.items()) + " tokens/s"
            for peer, target in (("generate()", 0.9), ("vllm", 0.75)):
                if peer in rates and (burst > 1 or peer != "vllm"):
                    name = f"engines: a burst of {burst} against {peer}"
                    ratio = rates["ours"] / rates[peer]
                    found.append(Ratio(name, ratio, target, at_least=True, detail=detail))
    return found
