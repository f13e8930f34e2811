"""A forward pass over what was sampled: how far recorded logprobs are from those that the model gives.

Nothing of the engine that sampled is used but its weights: no batch that requests join, no rows, no packed matrices. So
what agrees was computed twice, in two ways.
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
from loopwright.engines.inprocess.models import bare, put_weights
from loopwright.engines.inprocess.sampler import reshaped

_ADAPTERS = "adapter_config.json"
"""What tells a directory of adapters, as peft writes them."""
_BATCH_TOKENS = 8192
"""Tokens of the passages that are read together, padding included."""
_STEP_TOKENS = 1024
"""Tokens that go through the model at a time: their logits are large."""
_EDGE = 1e-4
"""How near to its edge top-p and min-p may take in one token more or less: rounding decides there, not the model."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of tokens, and those of them to look at: where they stand, and what was recorded of each."""

    ids: Sequence[int]
    places: Sequence[int]
    logprobs: Sequence[float]
    samplings: Sequence[Sampling]


class Forward:
    """A model that reads."""

    def __init__(self, config: TransformersConfig, home: Path) -> None:
        for problem in config.problems(home):
            raise EngineError(str(problem))
        self._name, self._config, self._home = config.model, config, home
        self._model = self._bare()

    def _bare(self) -> Any:
        model, _ = bare(self._config, self._home)
        model.set_attn_implementation("sdpa")
        return model

    def put(self, weights: Path) -> None:
        """Read with these weights from now on, or with these adapters of the model. EngineError if they do not fit."""
        if not (weights / _ADAPTERS).is_file():
            return put_weights(self._model, weights)
        try:
            from peft import PeftModel
        except ImportError as error:
            raise MissingExtra("reading with adapters", "train") from error
        try:
            self._model = PeftModel.from_pretrained(self._bare(), str(weights)).merge_and_unload()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise EngineError(f"the adapters in {weights} do not fit {self._name!r}: {error}") from error
        return None

    def differences(self, passages: Sequence[Passage]) -> list[list[float]]:
        """For each token of each passage, how far what was recorded is from what the model gives."""
        self._check(passages)
        found: list[list[float]] = [[] for _ in passages]
        for batch in _batches([len(passage.ids) for passage in passages]):
            for row, offs in zip(batch, self._read([passages[row] for row in batch]), strict=True):
                found[row] = offs
        return found

    def _check(self, passages: Sequence[Passage]) -> None:
        size = self._model.config.get_text_config().vocab_size
        for passage in passages:
            for token in (min(passage.ids), max(passage.ids)):
                if not 0 <= token < size:
                    raise EngineError(
                        f"{token} is no token of {self._name!r}, which has {size}: another model sampled this, or the "
                        "record was changed. Say with --engine which model it was."
                    )

    @torch.inference_mode()
    def _read(self, passages: Sequence[Passage]) -> list[list[float]]:
        """Passages side by side, padded at their ends, where no token of theirs looks."""
        from transformers import DynamicCache

        device, longest = self._model.device, max(len(passage.ids) for passage in passages)
        padded = torch.tensor([[*p.ids, *[0] * (longest - len(p.ids))] for p in passages], device=device)
        found: list[list[float]] = [[0.0] * len(passage.places) for passage in passages]
        cache, step = DynamicCache(), max(1, _STEP_TOKENS // len(passages))
        last = max(place for passage in passages for place in passage.places)
        for start in range(0, last, step):
            now = padded[:, start : min(start + step, last)]
            # The token at a place is told by what comes before it.
            asked = [
                (row, index, place - 1 - start)
                for row, passage in enumerate(passages)
                for index, place in enumerate(passage.places)
                if start < place <= start + now.shape[1]
            ]
            columns = sorted({column for _, _, column in asked}) or [0]
            keep = torch.tensor(columns, device=device)
            logits = self._model(input_ids=now, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits
            at = {column: index for index, column in enumerate(columns)}
            for row, index, column in asked:
                passage = passages[row]
                token, sampling = passage.ids[passage.places[index]], passage.samplings[index]
                found[row][index] = off_by(logits[row, at[column]], token, passage.logprobs[index], sampling)
        return found


def off_by(logits: Tensor, token: int, recorded: float, sampling: Sampling) -> float:
    """How far a recorded logprob is from that of the distribution which these logits and this sampling make.

    A token that could not have been sampled is off by as much as it is less likely than the least likely that could.
    """
    if not math.isfinite(recorded) or not torch.isfinite(logits[token]):
        return math.inf  # which no tolerance lets pass, as it would what is not a number
    if sampling.temperature == 0 or sampling.top_k == 1:
        return abs(recorded) + float(logits.max() - logits[token])
    off = _off_by(logits, token, recorded, sampling)
    if off > _EDGE and (sampling.top_p < 1.0 or sampling.min_p > 0.0):
        others = (_moved(sampling, 1.0 - _EDGE), _moved(sampling, 1.0 + _EDGE))
        return min(off, *(_off_by(logits, token, recorded, other) for other in others))
    return off


def _off_by(logits: Tensor, token: int, recorded: float, sampling: Sampling) -> float:
    logprobs = reshaped(logits[None], [sampling])[0]
    if torch.isfinite(logprobs[token]):
        return abs(recorded - float(logprobs[token]))
    kept = torch.isfinite(logprobs)
    least = float(logprobs[kept].min())
    return abs(recorded - least) + float(logits[kept].min() - logits[token])


def _moved(sampling: Sampling, by: float) -> Sampling:
    return sampling.model_copy(update={"top_p": min(1.0, sampling.top_p * by), "min_p": min(1.0, sampling.min_p / by)})


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Passages of like length together, so that little is padded."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batch and (len(batch) + 1) * lengths[row] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
