"""The sampler: logits to tokens, with the logprobs of the distribution that was sampled from.

Each token of the vocabulary runs a race: an exponential delay over its probability, and the first one wins, which is
exact sampling. The delays depend on the seed and the position alone. So a token does not depend on who else is in the
batch, or on where a stream was interrupted, and rounding errors change it only where two would have won at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from loopwright.engines.base import Sampling, Tops


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled."""

    sampling: Sampling
    seed: str
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[tuple[int, float]]:
    """A token and its logprob for each row."""
    likeliest = logits.argmax(-1).tolist()
    found = [(int(token), 0.0) for token in likeliest]  # with temperature 0 nothing else was possible
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and draw.sampling.top_k != 1]
    if not rows:
        return found
    drawn = [draws[row] for row in rows]
    logprobs = reshaped(logits if len(rows) == len(draws) else logits[rows], [draw.sampling for draw in drawn])
    winners = (logprobs.exp() / delays(drawn, logits.shape[-1]).to(logprobs.device)).argmax(-1)
    chosen = logprobs.gather(-1, winners[:, None])[:, 0].clamp(max=0.0)
    for row, token, logprob in zip(rows, winners.tolist(), chosen.tolist(), strict=True):
        found[row] = token, logprob
    return found


def likeliest(logits: Tensor, draws: Sequence[Draw]) -> list[Tops | None]:
    """The likeliest tokens of each row and their logprobs, as many as it asks for; None where it asks for none."""
    found: list[Tops | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if not (count := draw.sampling.top_logprobs):
            continue
        if draw.sampling.temperature == 0 or draw.sampling.top_k == 1:
            found[row] = (((int(logits[row].argmax()), 0.0),),)  # nothing else was possible
            continue
        best, tokens = reshaped(logits[row][None], [draw.sampling])[0].topk(min(count, logits.shape[-1]))
        pairs = zip(tokens.tolist(), best.clamp(max=0.0).tolist(), strict=True)
        found[row] = (tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf),)
    return found


def delays(draws: Sequence[Draw], size: int) -> Tensor:
    """An exponential delay for each token of each row."""
    found = np.empty((len(draws), size), dtype=np.float32)
    for row, draw in enumerate(draws):
        key = blake2b(f"{draw.seed}:{draw.position}".encode("utf-8", "replace"), digest_size=16).digest()
        # In double precision: in single precision, delays of 0 would let impossible tokens win.
        found[row] = np.random.Generator(np.random.PCG64(int.from_bytes(key))).standard_exponential(size)
    return torch.from_numpy(np.maximum(found, np.finfo(np.float32).tiny, out=found))


def reshaped(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logprobs after temperature, top-k, top-p and min-p, in that order."""
    logits = logits.float()
    if any(sampling.temperature != 1.0 for sampling in samplings):
        temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], device=logits.device)
        # From the highest down, so that no temperature makes infinities meet.
        logits = (logits - logits.amax(-1, keepdim=True)) / temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    logprobs = torch.log_softmax(logits, -1)
    for row, sampling in enumerate(samplings):
        if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            logprobs[row] = _narrowed(logprobs[row], sampling)
    return logprobs


def _narrowed(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """One row without the tokens that may not be sampled; each rule sees what the one before it left."""
    ordered, tokens = logprobs.sort(descending=True, stable=True)
    count = min(sampling.top_k or len(ordered), len(ordered))
    chances = torch.softmax(ordered[:count].double(), -1)
    if sampling.top_p < 1.0:
        before = chances.cumsum(-1) - chances
        count = max(1, int((before < sampling.top_p).sum()))
    if sampling.min_p > 0.0:
        count = max(1, int((chances[:count] >= sampling.min_p * chances[0]).sum()))
    found = torch.full_like(logprobs, -torch.inf)
    found[tokens[:count]] = torch.log_softmax(ordered[:count], -1)
    return found
