"""The learner: trains the policy on samples, alone or as one worker of Ray Train."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.failure import TrainingFailed, wrong_checkpoint
from loopwright.trainers.model import Policy
from loopwright.trainers.sample import Sample, micro_batches, scale_of, shares, split
from loopwright.trainers.shards import full, gather, local_part

_SMALL = 1e-8
_TRAINER, _CRITIC = "trainer.safetensors", "critic/"
_IDLE = Sample(np.zeros(2, np.int64), np.array([False, True]), np.zeros(2, np.float32), 0.0, 0.0, 0.0, 0)
"""A sample without any effect, for workers that have nothing to compute."""


class Team:
    """The workers that train together: each computes a share of the batch, and all apply the same gradient.

    This is a team of one.
    """

    rank, size = 0, 1

    def join(self, module: Any) -> Any:
        """A module whose gradients are averaged over the team."""
        return module

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the team."""
        return list(numbers)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Maxima over the team."""
        return list(numbers)

    def passes(self, batches: int) -> int:
        """Forward passes of a worker with this many micro-batches: sharded workers need the same number."""
        return max(batches, 1)


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Values of a sample's tokens, computed before the first step of an update."""

    old_logprobs: Tensor | None
    advantages: Tensor
    reference: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Everything that a learner is built from, as plain data, so that it can be built on any node."""

    config: TrainConfig
    algorithm: type[Algorithm]
    model: str
    scenario_dir: Path
    model_seed: int = 0
    temperature: float = 1.0
    max_tokens: int = 256
    """Tokens of the longest turn, the default divisor of a `constant` length."""
    device: str = "cpu"
    """The torch device; each Ray Train worker has its own."""


class Learner:
    """Trains the policy, one batch at a time."""

    def __init__(self, settings: LearnerSettings, team: Team | None = None) -> None:
        self.settings, self.config = settings, settings.config
        self.algorithm, self.team = settings.algorithm(settings.config), team or Team()
        _check_device(settings.device)
        self.policy = Policy(
            settings.config,
            settings.model,
            settings.scenario_dir,
            critic=self.algorithm.critic,
            seed=settings.model_seed,
            device=settings.device,
        )
        self._module = self.team.join(self.policy.module)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Train on these samples and return metrics. Steps with non-finite loss or gradient are skipped.

        Parts of the batch without any signal take no step either, because momentum alone would move the weights.
        """
        metrics = _Metrics()
        divisor = self.algorithm.constant or self.settings.max_tokens
        parts = [
            (part, scale_of(part, self.algorithm.length, int(divisor)))
            for epoch in range(self.config.epochs)
            for part in split(samples, self.config.minibatches, f"{self.config.seed}:{step}:{epoch}")
            if any(map(self._has_signal, part))
        ]
        own = self._share(samples)
        mine = {id(sample): sample for share in (own, *(self._share(part) for part, _ in parts)) for sample in share}
        precomputed = self._precompute(list(mine.values()), several_steps=len(parts) > 1)
        if self.algorithm.critic:
            precomputed = self._normalise(precomputed, own)
        rate = self._rate(step)
        skipped, trained = 0, dict[int, Sample]()
        for part, scale in parts:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self._step(part, scale, precomputed, metrics):
                trained |= {id(sample): sample for sample in part if self._has_signal(sample)}
            else:
                skipped += 1
        means = metrics.means(self.team) if parts else {}
        counts = {
            "trained_episodes": len({sample.episode for sample in trained.values()}),
            "tokens": sum(sample.tokens for sample in trained.values()),
            "skipped": skipped,
            "updates": len(parts) - skipped,
        }
        return {**means, "lr": rate, **{name: float(count) for name, count in counts.items()}}

    # -- one step of the optimizer --------------------------------------------------------------------------------

    def _step(
        self, samples: Sequence[Sample], scale: float, precomputed: Mapping[int, Precomputed], metrics: "_Metrics"
    ) -> bool:
        """Accumulate the team's gradients and take an optimizer step; False if loss or gradient is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        batches = self._with_idle(micro_batches(self._share(samples), self.config.micro_tokens))
        no_sync = getattr(self._module, "no_sync", nullcontext)
        total = 0.0
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else no_sync():
                loss = self._loss(batch, precomputed, metrics) * scale
                # Gradients are averaged over the team, but must be summed.
                torch.autograd.backward(loss * self.team.size)
                total += float(loss.detach())
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)))
        (total,) = self.team.total([total])
        if not (math.isfinite(norm) and math.isfinite(total)):
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self.optimizer.step()
        metrics.add_step(loss=total, grad_norm=norm)
        return True

    def _loss(self, batch: Sequence[Sample], precomputed: Mapping[int, Precomputed], metrics: "_Metrics") -> Tensor:
        """The weighted sum of the losses of a micro-batch's tokens."""
        config, policy = self.config, self._evaluate(batch)
        facts = []
        for sample in batch:
            if (fact := precomputed.get(id(sample))) is None:
                advantages = torch.full((sample.tokens,), sample.advantage, device=self.settings.device)
                fact = Precomputed(None, advantages, returns=torch.zeros_like(advantages))
            facts.append(fact)
        recorded = _flat([torch.from_numpy(sample.recorded[sample.mask]) for sample in batch], self.settings.device)
        old = policy.logprobs.detach()
        if facts[0].old_logprobs is not None:
            old = _concatenate([fact.old_logprobs for fact in facts])
        tokens = TokenBatch(
            old_logprobs=old,
            advantages=_concatenate([fact.advantages for fact in facts]),
            returns=None if facts[0].returns is None else _concatenate([fact.returns for fact in facts]),
        )
        loss, values = self.algorithm.loss(policy, tokens)
        drift = old - recorded
        values = {**values, "mismatch_kl": _excess(drift)}
        if config.importance:
            importance = drift.exp().clamp(max=config.importance)
            loss = loss * importance
            values = {**values, "importance": importance}
        if config.kl:
            # Only the idle sample has no reference.
            reference = old if facts[0].reference is None else _concatenate([fact.reference for fact in facts])
            log_ratio = reference - policy.logprobs
            kl = _excess(log_ratio)
            loss = loss + config.kl * kl
            values = {**values, "kl": kl.detach()}
        if config.entropy:
            loss = loss - config.entropy * policy.entropy
        weights = _flat([torch.full((sample.tokens,), sample.weight) for sample in batch], self.settings.device)
        metrics.add(weights > 0, entropy=policy.entropy.detach(), **values)
        metrics.add_largest(weights > 0, mismatch_max=drift.abs())
        return (loss * weights).sum()

    def _share(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples that this worker computes."""
        return shares([sample for sample in samples if self._has_signal(sample)], self.team.size)[self.team.rank]

    def _with_idle(self, batches: list[list[Sample]]) -> list[list[Sample]]:
        """This worker's micro-batches, followed by idle ones, so that it takes part in all passes of the team."""
        return batches + [[_IDLE]] * (self.team.passes(len(batches)) - len(batches))

    def _has_signal(self, sample: Sample) -> bool:
        """Whether it can change the weights: by its advantage, or by a term that does not depend on that."""
        return bool(sample.advantage or self.config.kl or self.config.entropy or self.algorithm.critic)

    def _rate(self, step: int) -> float:
        config = self.config
        if step <= config.warmup:
            return config.lr * step / config.warmup
        done = (step - 1 - config.warmup) / max(1, config.steps - config.warmup)
        if config.schedule == "linear":
            return config.lr * (1 - done)
        return config.lr * (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else config.lr

    # -- the model ------------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Sequence[Sample], *, sync: bool = True) -> PolicyOutput:
        """The policy's output for the tokens of a micro-batch; `sync = False` skips the team's gradient averaging."""
        longest = max(len(sample.ids) for sample in batch)
        ids = np.zeros((len(batch), longest), dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.bool_)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.ids)], mask[row, : len(sample.mask)] = sample.ids, sample.mask
        device, module = self.settings.device, self._module if sync else self.policy.module
        is_bfloat16 = self.config.dtype == "bfloat16"
        with torch.autocast(torch.device(device).type, torch.bfloat16) if is_bfloat16 else nullcontext():
            tensors = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
            return PolicyOutput(*module(*tensors, self.settings.temperature, self.config.entropy > 0))

    @torch.no_grad()
    def _precompute(self, samples: Sequence[Sample], *, several_steps: bool) -> dict[int, Precomputed]:
        """Values from before the first step; empty if there is one step and neither a critic nor a reference."""
        if not (several_steps or self.algorithm.critic or self.config.kl):
            return {}
        result: dict[int, Precomputed] = {}
        batches = micro_batches(samples, self.config.micro_tokens)
        passes = self._with_idle(batches)
        current = [self._evaluate(batch, sync=False) for batch in passes]
        initial: list[PolicyOutput | None] = [None] * len(passes)
        if self.config.kl:
            with self.policy.initial_weights():
                initial = [self._evaluate(batch, sync=False) for batch in passes]
        for batch, now, before in zip(batches, current, initial, strict=False):  # without the idle ones
            start = 0
            for sample in batch:
                tokens = slice(start, start := start + sample.tokens)
                values = None if now.values is None else now.values[tokens]
                advantages = torch.full((sample.tokens,), sample.advantage, device=self.settings.device)
                advantages, returns = self.algorithm.credit(advantages, sample.reward, values)
                reference = None if before is None else before.logprobs[tokens]
                result[id(sample)] = Precomputed(now.logprobs[tokens], advantages, reference, returns)
        return result

    def _normalise(self, precomputed: Mapping[int, Precomputed], own: Sequence[Sample]) -> dict[int, Precomputed]:
        """Advantages with mean 0 and variance 1 over the batch, so that `lr` does not depend on the reward's scale.

        A worker may compute other samples in the parts than in the batch; only its `own` of the batch are counted here.
        """
        mine = [precomputed[id(sample)].advantages.double() for sample in own]
        sizes, sums = sum(map(len, mine)), sum(float(each.sum()) for each in mine)
        count, total, squares = self.team.total([sizes, sums, sum(float(each.square().sum()) for each in mine)])
        mean = total / count
        spread = math.sqrt(max(0.0, squares / count - mean * mean)) + _SMALL
        return {key: replace(one, advantages=(one.advantages - mean) / spread) for key, one in precomputed.items()}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> None:
        """Write everything that training resumes from: the policy, the critic and the optimizer's state."""
        self.policy.write(directory)
        save_file({name: value.contiguous() for name, value in self._trainer_state().items()}, directory / _TRAINER)

    def join_gather(self, *, checkpoint: bool) -> None:
        """Take part while the first worker gathers a sharded policy, or with `checkpoint` all training state."""
        if checkpoint and self.config.lora is not None:
            self.policy.adapters()
        else:
            self.policy.weights()
        if checkpoint:
            self._trainer_state()

    def _trainer_state(self) -> dict[str, Tensor]:
        tensors = {f"{_CRITIC}{name}": value for name, value in self._critic().items()}
        names = list(self.policy.trainable())
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{names[index]}/{key}": torch.as_tensor(value) for key, value in state.items()}
        return gather(tensors)

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Resume from a checkpoint."""
        self.policy.read(directory)
        tensors = load_file(directory / _TRAINER)
        for name, target in self._critic().items():
            if (key := f"{_CRITIC}{name}") not in tensors:
                raise wrong_checkpoint(directory, key)
            target.copy_(local_part(tensors[key], target))
        optimizer = {**self.optimizer.state_dict(), "state": {}}
        for index, (name, target) in enumerate(self.policy.trainable().items()):
            prefix = f"optimizer/{name}/"
            values = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if values:
                parts = {k: local_part(v, target) if v.shape == target.shape else v for k, v in values.items()}
                optimizer["state"][index] = parts
        self.optimizer.load_state_dict(optimizer)

    def _critic(self) -> dict[str, Tensor]:
        critic = self.policy.module.critic
        return {} if critic is None else dict(critic.named_parameters())


class _Metrics:
    """Means over tokens and steps, across the team."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._largest: dict[str, float] = {}

    def add(self, included: Tensor, **tokens: Tensor) -> None:
        """Add the included tokens. A name is recorded even without any: all workers must sum the same names."""
        for name, values in tokens.items():
            self._sums[name] += float(values[included].sum())
            self._counts[name] += int(included.sum())

    def add_largest(self, included: Tensor, **tokens: Tensor) -> None:
        """Add the included tokens to a maximum."""
        for name, values in tokens.items():
            largest = float(values[included].max()) if included.any() else 0.0
            self._largest[name] = max(self._largest.get(name, 0.0), largest)

    def add_step(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self._steps[name].append(value)

    def means(self, team: Team) -> dict[str, float]:
        names = sorted(self._sums)
        totals = team.total([*(self._sums[name] for name in names), *(float(self._counts[name]) for name in names)])
        sums, counts = totals[: len(names)], totals[len(names) :]
        means = {name: sums[i] / counts[i] for i, name in enumerate(names) if counts[i]}
        means |= dict(zip(self._largest, team.largest(list(self._largest.values())), strict=True))
        return means | {name: sum(values) / len(values) for name, values in self._steps.items()}


def _excess(log_ratio: Tensor) -> Tensor:
    """The unbiased, never negative estimate of a KL divergence: ratio − 1 − its logarithm.

    By `expm1` in double precision: near a ratio of 1, the difference of two floats is only rounding.
    """
    exact = log_ratio.double()
    return (torch.expm1(exact) - exact).to(log_ratio.dtype)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TrainingFailed(
            f"cannot train on device {device!r}: {reason}. Set `device` to an available one."
        ) from error


def _flat(parts: Sequence[Tensor], device: str) -> Tensor:
    return torch.cat(list(parts)).to(device)


def _concatenate(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None])
