"""Engines: tokens per second on a burst of requests, against `model.generate` on the same batch."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio, best_of
from loopwright.engines.base import Sampling
from loopwright.engines.inprocess import TransformersConfig, TransformersEngine

TOKENS = 64
BURSTS = (1, 8, 32)
HOME = Path(__file__).parent


def prompts(count: int, engine: TransformersEngine) -> list[list[int]]:
    """Questions that differ from their first token on, so that nothing is shared."""
    start, end = (engine.tokenizer.specials[name] for name in ("<|im_start|>", "<|im_end|>"))
    encode = engine.tokenizer.encode
    closing = [end, *encode("\n"), start, *encode("assistant\n")]
    return [
        [*encode(str(n)), start, *encode(f"user\nTell me a story about {n} bears and {n * 7} bees."), *closing]
        for n in range(100, 100 + count)
    ]


def ours(engine: TransformersEngine, asked: list[list[int]]) -> None:
    async def one(ids: list[int], seed: str) -> int:
        sampling = Sampling(max_tokens=TOKENS)
        return sum([len(chunk.ids) async for chunk in engine.generate(ids, sampling, seed=seed)])

    async def main() -> None:
        said = await asyncio.gather(*(one(ids, str(n)) for n, ids in enumerate(asked)))
        if said != [TOKENS] * len(asked):
            raise RuntimeError(f"{said} tokens instead of {TOKENS} each")

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
    for burst in BURSTS:
        asked = prompts(burst, engine)
        taken = best_of(3, {"ours": partial(ours, engine, asked), "theirs": partial(theirs, model, asked)})
        rates = {who: burst * TOKENS / seconds for who, seconds in taken.items()}
        detail = f"{rates['ours']:.0f} and {rates['theirs']:.0f} tokens/s"
        ratio = rates["ours"] / rates["theirs"]
        found.append(Ratio(f"engines: a burst of {burst} against generate()", ratio, 0.9, at_least=True, detail=detail))
    return found
