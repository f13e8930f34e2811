"""A forward pass over sampled tokens: how far recorded logprobs are from the model's.

It shares only the weights with the engine that sampled: no batching, no KV cache of ours, no packed matrices. Logprobs
that agree were computed independently.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from loopwright.core.errors import MissingExtra
from loopwright.engines.base import EngineError, Sampling
from loopwright.engines.inprocess.engine import TransformersConfig
from loopwright.engines.inprocess.models import load_plain, put_weights
from loopwright.engines.inprocess.sampler import reshape

_ADAPTERS = "adapter_config.json"
"""The file that marks a directory of adapters written by peft."""
_BATCH_TOKENS = 8192
"""Tokens of the passages in one batch, padding included."""
_STEP_TOKENS = 1024
"""Tokens that go through the model at a time: their logits are large."""
_TOLERANCE = 1e-4
"""The relative tolerance of top-p and min-p: near their thresholds, rounding decides which tokens are included."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A sequence of tokens, and the positions to check with the logprob and sampling recorded at each."""

    ids: Sequence[int]
    positions: Sequence[int]
    logprobs: Sequence[float]
    samplings: Sequence[Sampling]


class Forward:
    """Recomputes the logprobs of passages with a model."""

    def __init__(self, config: TransformersConfig, scenario_dir: Path) -> None:
        for problem in config.problems(scenario_dir):
            raise EngineError(str(problem))
        self._name, self._config, self._scenario_dir = config.model, config, scenario_dir
        self._model = self._load()

    def _load(self) -> Any:
        model, _ = load_plain(self._config, self._scenario_dir)
        model.set_attn_implementation("sdpa")
        return model

    def put(self, weights: Path) -> None:
        """Use these weights, or these adapters, from now on. EngineError if they do not fit."""
        if not (weights / _ADAPTERS).is_file():
            return put_weights(self._model, weights)
        try:
            from peft import PeftModel
        except ImportError as error:
            raise MissingExtra("loading adapters", "train") from error
        try:
            self._model = PeftModel.from_pretrained(self._load(), str(weights)).merge_and_unload()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise EngineError(f"the adapters in {weights} do not fit {self._name!r}: {error}") from error
        return None

    def differences(self, passages: Sequence[Passage]) -> list[list[float]]:
        """For each position of each passage, how far the recorded logprob is from the model's."""
        size = self._model.config.get_text_config().vocab_size
        for passage in passages:
            for token in (min(passage.ids), max(passage.ids)):
                if not 0 <= token < size:
                    raise EngineError(
                        f"{token} is not a token of {self._name!r}, whose vocabulary has {size}: another model sampled "
                        "this, or the record was changed. Name the model with --engine."
                    )
        differences: list[list[float]] = [[] for _ in passages]
        for batch in _batches([len(passage.ids) for passage in passages]):
            for row, errors in zip(batch, self._read([passages[row] for row in batch]), strict=True):
                differences[row] = errors
        return differences

    @torch.inference_mode()
    def _read(self, passages: Sequence[Passage]) -> list[list[float]]:
        """One batch of passages, padded at the right, where attention does not reach."""
        from transformers import DynamicCache

        device, longest = self._model.device, max(len(passage.ids) for passage in passages)
        padded = torch.tensor([[*p.ids, *[0] * (longest - len(p.ids))] for p in passages], device=device)
        differences: list[list[float]] = [[0.0] * len(passage.positions) for passage in passages]
        cache, step = DynamicCache(), max(1, _STEP_TOKENS // len(passages))
        last = max(position for passage in passages for position in passage.positions)
        for start in range(0, last, step):
            now = padded[:, start : min(start + step, last)]
            # The logits one position earlier predict the token.
            targets = [
                (row, index, position - 1 - start)
                for row, passage in enumerate(passages)
                for index, position in enumerate(passage.positions)
                if start < position <= start + now.shape[1]
            ]
            columns = sorted({column for _, _, column in targets}) or [0]
            keep = torch.tensor(columns, device=device)
            logits = self._model(input_ids=now, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits
            at = {column: index for index, column in enumerate(columns)}
            for row, index, column in targets:
                passage = passages[row]
                token, sampling = passage.ids[passage.positions[index]], passage.samplings[index]
                logprob = passage.logprobs[index]
                differences[row][index] = difference(logits[row, at[column]], token, logprob, sampling)
        return differences


def difference(logits: Tensor, token: int, recorded: float, sampling: Sampling) -> float:
    """How far a recorded logprob is from that of the distribution that these logits and this sampling define.

    For a token that could not have been sampled, the gap to the least likely possible token is added.
    """
    if not math.isfinite(recorded) or not torch.isfinite(logits[token]):
        return math.inf  # exceeds any tolerance, unlike NaN
    if sampling.greedy:
        return abs(recorded) + float(logits.max() - logits[token])
    exact = _difference(logits, token, recorded, sampling)
    if exact > _TOLERANCE and (sampling.top_p < 1.0 or sampling.min_p > 0.0):
        shifted = []
        for factor in (1.0 - _TOLERANCE, 1.0 + _TOLERANCE):
            limits = {"top_p": min(1.0, sampling.top_p * factor), "min_p": min(1.0, sampling.min_p / factor)}
            shifted.append(_difference(logits, token, recorded, sampling.model_copy(update=limits)))
        return min(exact, *shifted)
    return exact


def _difference(logits: Tensor, token: int, recorded: float, sampling: Sampling) -> float:
    logprobs = reshape(logits[None], [sampling])[0]
    if torch.isfinite(logprobs[token]):
        return abs(recorded - float(logprobs[token]))
    possible = torch.isfinite(logprobs)
    return abs(recorded - float(logprobs[possible].min())) + float(logits[possible].min() - logits[token])


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of passages with similar lengths, so that there is little padding."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batch and (len(batch) + 1) * lengths[row] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
