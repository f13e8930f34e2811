"""The sampler: logits to tokens, with the logprobs of the distribution that was sampled from.

This is exact sampling by an exponential race: each token gets an exponential delay divided by its probability, and the
smallest one wins. Delays depend only on the seed and the position. A token therefore does not depend on the rest of the
batch or on where a stream was interrupted, and rounding errors change it only in a near tie.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

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
    context: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """The tokens of prompt and turn so far, if a penalty needs them."""
    sampled: int = 0
    """How many of the last of them belong to the turn."""


def steer(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits after bias and penalties, in the order of vLLM: bias, then repetition, frequency and presence."""
    if all(draw.context is None for draw in draws):
        return logits
    logits = logits.float().clone()
    for values, draw in zip(logits, draws, strict=True):
        sampling, context = draw.sampling, draw.context
        if context is None:
            continue
        for token, bias in sampling.logit_bias:
            values[token] += bias
        if sampling.repetition_penalty != 1.0:
            at = torch.from_numpy(np.unique(context)).to(values.device)
            some = values[at]
            values[at] = torch.where(some > 0, some / sampling.repetition_penalty, some * sampling.repetition_penalty)
        if draw.sampled and (sampling.frequency_penalty or sampling.presence_penalty):
            tokens, counts = np.unique(context[-draw.sampled :], return_counts=True)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            values[torch.from_numpy(tokens).to(values.device)] -= torch.from_numpy(penalties).to(values)
    return logits


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[tuple[int, float]]:
    """A token and its logprob for each row of steered logits."""
    results = [(int(token), 0.0) for token in logits.argmax(-1).tolist()]  # greedy: nothing else is possible
    rows = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if not rows:
        return results
    random_draws = [draws[row] for row in rows]
    logprobs = reshape(logits if len(rows) == len(draws) else logits[rows], [draw.sampling for draw in random_draws])
    winners = (logprobs.exp() / delays(random_draws, logits.shape[-1]).to(logprobs.device)).argmax(-1)
    winner_logprobs = logprobs.gather(-1, winners[:, None])[:, 0].clamp(max=0.0)
    for row, token, logprob in zip(rows, winners.tolist(), winner_logprobs.tolist(), strict=True):
        results[row] = token, logprob
    return results


def likeliest(logits: Tensor, draws: Sequence[Draw]) -> list[Tops | None]:
    """The likeliest tokens of each row and their logprobs, `top_logprobs` of them; None where that is 0."""
    results: list[Tops | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if not (count := draw.sampling.top_logprobs):
            continue
        if draw.sampling.greedy:
            results[row] = (((int(logits[row].argmax()), 0.0),),)  # nothing else is possible
            continue
        best, tokens = reshape(logits[row][None], [draw.sampling])[0].topk(min(count, logits.shape[-1]))
        pairs = zip(tokens.tolist(), best.clamp(max=0.0).tolist(), strict=True)
        results[row] = (tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf),)
    return results


def delays(draws: Sequence[Draw], size: int) -> Tensor:
    """An exponential delay for each token of each row."""
    values = np.empty((len(draws), size), dtype=np.float32)
    for row, draw in enumerate(draws):
        key = blake2b(f"{draw.seed}:{draw.position}".encode("utf-8", "replace"), digest_size=16).digest()
        # In double precision: in single precision, delays of 0 would let impossible tokens win.
        values[row] = np.random.Generator(np.random.PCG64(int.from_bytes(key))).standard_exponential(size)
    return torch.from_numpy(np.maximum(values, np.finfo(np.float32).tiny, out=values))


def reshape(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logprobs after temperature, top-k, top-p and min-p, in that order."""
    logits = logits.float()
    if any(sampling.temperature != 1.0 for sampling in samplings):
        temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], device=logits.device)
        # Relative to the maximum, so that no temperature causes inf - inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    logprobs = torch.log_softmax(logits, -1)
    for row, sampling in enumerate(samplings):
        if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            logprobs[row] = _truncate(logprobs[row], sampling)
    return logprobs


def _truncate(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Exclude tokens of one row; each rule sees what the one before it left."""
    ordered, tokens = logprobs.sort(descending=True, stable=True)
    count = min(sampling.top_k or len(ordered), len(ordered))
    probabilities = torch.softmax(ordered[:count].double(), -1)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities
        count = max(1, int((before < sampling.top_p).sum()))
    if sampling.min_p > 0.0:
        count = max(1, int((probabilities[:count] >= sampling.min_p * probabilities[0]).sum()))
    result = torch.full_like(logprobs, -torch.inf)
    result[tokens[:count]] = torch.log_softmax(ordered[:count], -1)
    return result
