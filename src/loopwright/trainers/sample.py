"""Samples: the branches of episodes, as a learner sees them. Each sampled token is in exactly one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from loopwright.core.episode import Episode
from loopwright.engines.base import Sampling
from loopwright.trainers.failure import TrainingFailed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of an episode: all its tokens, which of them are trained on, and their recorded logprobs."""

    ids: Ints
    mask: Flags
    """Which tokens are trained on: sampled, in no earlier branch, and not too old."""
    recorded: Floats
    """The logprob with which each token was sampled; 0 where it was not."""
    advantage: float
    """The advantage of the episode."""
    reward: float
    weight: float
    """The weight of each of its tokens, before the batch is normalised: branches of one episode count as one."""
    episode: int
    """The index of its episode in the batch."""
    staleness: int = 0
    """The age of its oldest token, in policy versions."""

    @property
    def tokens(self) -> int:
        """The number of tokens that are trained on."""
        return int(self.mask.sum())


def build_samples(
    groups: Sequence[Mapping[int, Episode]],
    advantages: Sequence[Mapping[int, float]],
    *,
    version: int,
    oldest: Sequence[int | None] | None = None,
    length: str = "episode",
    temperature: float = 1.0,
) -> list[Sample]:
    """The samples of a batch of groups, with the advantage of each trial.

    `length` sets the weight of a token: `episode` weights each episode the same, `token` each token, and `constant`
    divides by the same number everywhere, which avoids a length bias. `oldest` is, for each group, the oldest version
    whose tokens are trained on.
    """
    samples: list[Sample] = []
    # Sorted, so that a repeated step does not depend on the order in which rollouts finished.
    numbers = sorted((trial, group) for group, episodes in enumerate(groups) for trial in episodes)
    for index, (trial, group) in enumerate(numbers):
        episode = groups[group][trial]
        if not episode.trainable or episode.reward is None or trial not in advantages[group]:
            continue
        check_sampling(episode, temperature)
        rows = episode.rows(None if oldest is None else oldest[group])
        total = sum(sum(row.response_mask) for row in rows)
        weight = 1.0 / total if length == "episode" and total else 1.0
        for row in rows:
            prompt = len(row.prompt_ids)
            versions = [v for v, is_sampled in zip(row.versions, row.response_mask, strict=True) if is_sampled]
            samples.append(
                Sample(
                    ids=np.asarray(row.prompt_ids + row.response_ids, dtype=np.int64),
                    mask=np.asarray((0,) * prompt + row.response_mask, dtype=np.bool_),
                    recorded=np.asarray((0.0,) * prompt + row.logprobs, dtype=np.float32),
                    advantage=advantages[group][trial],
                    reward=episode.reward.value,
                    weight=weight,
                    episode=index,
                    staleness=max(0, version - min(versions, default=version)),
                )
            )
    return samples


def truncating_parameters(sampling: Sampling) -> list[str]:
    """The parameters that exclude or prefer tokens, so that logprobs are not those of the policy alone."""
    active = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return [*(name for name, is_active in active.items() if is_active), *sampling.steering]


def check_sampling(episode: Episode, temperature: float) -> None:
    """Raise TrainingFailed if its tokens were sampled from another distribution than the one that is trained."""
    expected = Sampling(temperature=temperature).reshapes
    for node in episode.nodes:
        if node.is_steered:  # its rows exclude it
            continue
        if node.spans and node.sampling != expected and Sampling(**node.sampling).reshapes != expected:
            raise TrainingFailed(
                f"a rollout of task {episode.task.id!r} was sampled with {_as_text(node.sampling)}, but the policy is "
                f"trained at {_as_text(expected)}. Sample with that, or set the loop's `sampling` to what it uses."
            )


def _as_text(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items()) or "temperature 1"


def scale_of(samples: Sequence[Sample], length: str, longest: int) -> float:
    """The factor of the sum of all tokens' losses."""
    episodes = len({sample.episode for sample in samples}) or 1
    if length == "token":
        return 1.0 / (sum(sample.tokens for sample in samples) or 1)
    return 1.0 / episodes if length == "episode" else 1.0 / (episodes * longest)


def split(samples: Sequence[Sample], parts: int, seed: str) -> list[list[Sample]]:
    """Random parts with about the same number of episodes; an episode is never split."""
    episodes = sorted({sample.episode for sample in samples})
    if parts > 1:
        Random(seed).shuffle(episodes)
    result: list[list[Sample]] = []
    for part in range(min(parts, len(episodes))):
        members = set(episodes[part::parts])
        result.append([sample for sample in samples if sample.episode in members])
    return result


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Batches of up to `max_tokens`, padding included; sorted by length, so that there is little padding."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda each: -len(each.ids)):
        # The first of each batch is the longest.
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def shares(samples: Sequence[Sample], workers: int) -> list[list[Sample]]:
    """The samples of each worker, with about the same number of tokens each."""
    result: list[list[Sample]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for sample in sorted(samples, key=lambda each: -len(each.ids)):
        least = loads.index(min(loads))
        result[least].append(sample)
        loads[least] += len(sample.ids)
    return result
