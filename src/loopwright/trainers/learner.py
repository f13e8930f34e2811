"""The learner: samples in, better weights out. The same one alone and as a worker of Ray Train."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.failure import TrainingFailed, foreign
from loopwright.trainers.model import Policy, said
from loopwright.trainers.sample import Sample, micro_batches, scale_of, shares, split
from loopwright.trainers.shards import gathered, held, whole

_SMALL = 1e-8
_TRAINER, _CRITIC = "trainer.safetensors", "critic/"
_IDLE = Sample(np.zeros(2, np.int64), np.array([False, True]), np.zeros(2, np.float32), 0.0, 0.0, 0.0, 0)
"""A sample that changes nothing."""


class Team(Protocol):
    """Those who train together. Alone, or the workers of Ray Train: each has a share, and all end with one gradient."""

    rank: int
    size: int

    def join(self, module: Any) -> Any:
        """A module whose gradients are the mean of everyone's."""
        ...

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of what everyone has."""
        ...

    def passes(self, own: int) -> int:
        """How often one goes through the model who has so many micro-batches: at times others wait for him."""
        ...


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def join(self, module: Any) -> Any:
        return module

    def total(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def passes(self, own: int) -> int:
        return max(own, 1)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a sample before the first step of an update, token by token."""

    old: Tensor | None
    advantages: Tensor
    reference: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What a learner is made of; plain data, so that it can be made anywhere."""

    config: TrainConfig
    algorithm: type[Algorithm]
    model: str
    home: Path
    model_seed: int = 0
    temperature: float = 1.0
    longest: int = 256
    """Tokens of the longest turn, which a `constant` length divides by."""
    device: str = "cpu"
    """Where it is trained, as torch names it; workers of Ray Train have their own."""


class Learner:
    """Holds the policy, and improves it by one batch at a time."""

    def __init__(self, setting: LearnerSettings, team: Team | None = None) -> None:
        self.setting, self.config = setting, setting.config
        self.algorithm, self.team = setting.algorithm(setting.config), team or Alone()
        _check(setting.device)
        self.policy = Policy(
            setting.config,
            setting.model,
            setting.home,
            critic=self.algorithm.critic,
            seed=setting.model_seed,
            device=setting.device,
        )
        self._scored = self.team.join(self.policy.scored)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Improve the policy by these samples; what there is to tell of it. A step that would break it is skipped.

        Where nothing is to be learned from a part of them, no step is taken: it would go on by momentum alone.
        """
        numbers = _Numbers()
        longest = self.algorithm.constant or self.setting.longest
        parts = [
            (part, scale_of(part, self.algorithm.length, int(longest)))
            for epoch in range(self.config.epochs)
            for part in split(samples, self.config.minibatches, f"{self.config.seed}:{step}:{epoch}")
            if any(map(self._counts, part))
        ]
        own = self._share(samples)
        mine = {id(sample): sample for share in (own, *(self._share(part) for part, _ in parts)) for sample in share}
        known = self._known(list(mine.values()), several=len(parts) > 1)
        if self.algorithm.critic:
            known = self._normalised(known, own)
        rate = self._rate(step)
        skipped = 0
        for part, scale in parts:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            skipped += not self._descend(part, scale, known, numbers)
        told = numbers.means(self.team) if parts else {}
        return {**told, "lr": rate, "skipped": float(skipped), "updates": float(len(parts) - skipped)}

    # -- one step of the optimizer --------------------------------------------------------------------------------

    def _descend(
        self, samples: Sequence[Sample], scale: float, known: Mapping[int, Known], numbers: "_Numbers"
    ) -> bool:
        """Sum up the gradients of everyone's share, and take a step; False if there is none to take."""
        self.optimizer.zero_grad(set_to_none=True)
        batches = self._together(micro_batches(self._share(samples), self.config.micro_tokens))
        waiting = getattr(self._scored, "no_sync", nullcontext)
        total = 0.0
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else waiting():
                loss = self._loss(batch, known, numbers) * scale
                # What is averaged over the team is meant to be summed up.
                torch.autograd.backward(loss * self.team.size)
                total += float(loss.detach())
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)))
        (total,) = self.team.total([total])
        if not (math.isfinite(norm) and math.isfinite(total)):
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self.optimizer.step()
        numbers.once(loss=total, grad_norm=norm)
        return True

    def _loss(self, batch: Sequence[Sample], known: Mapping[int, Known], numbers: "_Numbers") -> Tensor:
        """The weighed sum of what the tokens of a micro-batch cost."""
        config, now = self.config, self._said(batch)
        facts = [known.get(id(sample)) or _unknown(sample, self.setting.device) for sample in batch]
        recorded = _flat([torch.from_numpy(sample.recorded[sample.mask]) for sample in batch], self.setting.device)
        old = now.logprobs.detach() if facts[0].old is None else _joined([fact.old for fact in facts])
        tokens = TokenBatch(
            old=old,
            advantages=_joined([fact.advantages for fact in facts]),
            returns=None if facts[0].returns is None else _joined([fact.returns for fact in facts]),
        )
        cost, told = self.algorithm.loss(now, tokens)
        drift = old - recorded
        told = {**told, "mismatch_kl": drift.exp() - drift - 1}
        if config.importance:
            importance = drift.exp().clamp(max=config.importance)
            cost = cost * importance
            told = {**told, "importance": importance}
        if config.kl:
            # Only the sample that changes nothing has no reference: it stays where it is.
            reference = old if facts[0].reference is None else _joined([fact.reference for fact in facts])
            away = reference - now.logprobs
            distance = away.exp() - away - 1
            cost = cost + config.kl * distance
            told = {**told, "kl": distance.detach()}
        if config.entropy:
            cost = cost - config.entropy * now.entropy
        weights = _flat([torch.full((sample.tokens,), sample.weight) for sample in batch], self.setting.device)
        numbers.add(weights > 0, entropy=now.entropy.detach(), **told)
        return (cost * weights).sum()

    def _share(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those of the samples that this learner computes."""
        return shares([sample for sample in samples if self._counts(sample)], self.team.size)[self.team.rank]

    def _together(self, batches: list[list[Sample]]) -> list[list[Sample]]:
        """One's own micro-batches, and idle ones after them: everyone takes part, also with nothing in hand."""
        return batches + [[_IDLE]] * (self.team.passes(len(batches)) - len(batches))

    def _counts(self, sample: Sample) -> bool:
        """Whether anything would change by it: with no advantage, only what does not depend on it."""
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

    def _said(self, batch: Sequence[Sample], *, apart: bool = False) -> PolicyOutput:
        """What the policy thinks of the tokens of a micro-batch; `apart` from the team, which then need not follow."""
        longest = max(len(sample.ids) for sample in batch)
        ids = np.zeros((len(batch), longest), dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.bool_)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.ids)], mask[row, : len(sample.mask)] = sample.ids, sample.mask
        device, module = self.setting.device, self.policy.scored if apart else self._scored
        rough = self.config.dtype == "bfloat16"
        with torch.autocast(torch.device(device).type, torch.bfloat16) if rough else nullcontext():
            return said(
                module,
                torch.from_numpy(ids).to(device),
                torch.from_numpy(mask).to(device),
                self.setting.temperature,
                undecided=self.config.entropy > 0,
            )

    @torch.no_grad()
    def _known(self, samples: Sequence[Sample], *, several: bool) -> dict[int, Known]:
        """What must be known before the first step: nothing, where there is only one and no critic or reference."""
        if not (several or self.algorithm.critic or self.config.kl):
            return {}
        found: dict[int, Known] = {}
        batches = micro_batches(samples, self.config.micro_tokens)
        passes = self._together(batches)
        now = [self._said(batch, apart=True) for batch in passes]
        then: list[PolicyOutput | None] = [None] * len(passes)
        if self.config.kl:
            with self.policy.beginning():
                then = [self._said(batch, apart=True) for batch in passes]
        for batch, before, first in zip(batches, now, then, strict=False):  # idle ones stay unknown
            begun = 0
            for sample in batch:
                own = slice(begun, begun := begun + sample.tokens)
                values = None if before.values is None else before.values[own]
                start = torch.full((sample.tokens,), sample.advantage, device=self.setting.device)
                advantages, returns = self.algorithm.credit(start, sample.reward, values)
                reference = None if first is None else first.logprobs[own]
                found[id(sample)] = Known(before.logprobs[own], advantages, reference, returns)
        return found

    def _normalised(self, known: Mapping[int, Known], own: Sequence[Sample]) -> dict[int, Known]:
        """Advantages with mean 0 and variance 1 over the batch, so that the step size means the same for any reward.

        Parts may be dealt out otherwise than the batch, so only what is `own` in the batch is counted here.
        """
        mine = [known[id(sample)].advantages.double() for sample in own]
        sizes, sums = sum(map(len, mine)), sum(float(one.sum()) for one in mine)
        count, total, squares = self.team.total([sizes, sums, sum(float(one.square().sum()) for one in mine)])
        mean = total / count
        spread = math.sqrt(max(0.0, squares / count - mean * mean)) + _SMALL
        return {key: replace(one, advantages=(one.advantages - mean) / spread) for key, one in known.items()}

    # -- in and out -----------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> None:
        """All that training goes on from: the policy, and beside it the critic and what the optimizer remembers."""
        self.policy.write(directory)
        save_file({name: value.contiguous() for name, value in self._memory().items()}, directory / _TRAINER)

    def hand_over(self, *, everything: bool) -> None:
        """Take part where the first worker writes down a policy that lies in shards, or `everything` beside it."""
        if everything and self.config.lora is not None:
            self.policy.adapters()
        else:
            self.policy.weights()
        if everything:
            self._memory()

    def _memory(self) -> dict[str, Tensor]:
        found = {f"{_CRITIC}{name}": value for name, value in self._critic().items()}
        names = list(self.policy.learned())
        for index, memory in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{names[index]}/{key}": torch.as_tensor(value) for key, value in memory.items()}
        return gathered(found)

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Go on from there."""
        self.policy.read(directory)
        found = load_file(directory / _TRAINER)
        for name, place in self._critic().items():
            if (key := f"{_CRITIC}{name}") not in found:
                raise foreign(directory, key)
            place.copy_(held(found[key], place))
        kept = self.optimizer.state_dict()
        memories = [_below(found, f"optimizer/{name}/", place) for name, place in self.policy.learned().items()]
        kept["state"] = {index: memory for index, memory in enumerate(memories) if memory}
        self.optimizer.load_state_dict(kept)

    def _critic(self) -> dict[str, Tensor]:
        critic = self.policy.scored.critic
        return {} if critic is None else dict(critic.named_parameters())


class _Numbers:
    """Means over tokens and steps, also over those of a team."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._once: dict[str, list[float]] = defaultdict(list)

    def add(self, counted: Tensor, **tokens: Tensor) -> None:
        """Take in those that count. Names stay without any: everyone in a team sums up the same ones."""
        for name, values in tokens.items():
            self._sums[name] += float(values[counted].sum())
            self._counts[name] += int(counted.sum())

    def once(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self._once[name].append(value)

    def means(self, team: Team) -> dict[str, float]:
        names = sorted(self._sums)
        totals = team.total([*(self._sums[name] for name in names), *(float(self._counts[name]) for name in names)])
        sums, counts = totals[: len(names)], totals[len(names) :]
        found = {name: sums[i] / counts[i] for i, name in enumerate(names) if counts[i]}
        return found | {name: sum(values) / len(values) for name, values in self._once.items()}


def _unknown(sample: Sample, device: str) -> Known:
    advantages = torch.full((sample.tokens,), sample.advantage, device=device)
    return Known(None, advantages, returns=torch.zeros_like(advantages))


def _check(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise TrainingFailed(f"cannot train on device {device!r}: {why}. Set `device` to one that is here.") from error


def _flat(parts: Sequence[Tensor], device: str) -> Tensor:
    return torch.cat(list(parts)).to(device)


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None])


def _below(state: Mapping[str, Tensor], prefix: str, place: Tensor) -> dict[str, Tensor]:
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {name: held(value, place) if value.shape == place.shape else value for name, value in found.items()}
