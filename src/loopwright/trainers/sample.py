"""Samples: what a learner sees of an episode. Each token that the policy sampled is in exactly one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from loopwright.core.episode import Episode, Row
from loopwright.engines.base import Sampling
from loopwright.trainers.failure import TrainingFailed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of an episode: all its tokens, which of them are trained on, and what the policy thought of them."""

    ids: Ints
    mask: Flags
    """Which tokens are trained on: sampled, in no earlier branch, and not too old."""
    recorded: Floats
    """The logprob with which each token was sampled; 0 where it was not."""
    advantage: float
    """How much better the episode did than was to be expected."""
    reward: float
    weight: float
    """What each of its tokens counts for, before the batch is normalised: branches of one episode count as one."""
    episode: int
    """Which episode of the batch it belongs to."""
    staleness: int = 0
    """How many versions old its oldest token is."""

    @property
    def tokens(self) -> int:
        """How many are trained on."""
        return int(self.mask.sum())


def samples_of(
    groups: Sequence[Mapping[int, Episode]],
    advantages: Sequence[Mapping[int, float]],
    *,
    version: int,
    oldest: int | None,
    length: str = "episode",
    temperature: float = 1.0,
) -> list[Sample]:
    """The samples of a batch of groups, with the advantage of each trial.

    `length` says what a token counts for: `episode` gives each episode the same say, `token` each token, and
    `constant` divides by one number for all, so that long answers are neither favoured nor spared.
    """
    found: list[Sample] = []
    # Sorted: which one ended first must not decide which are trained on together, or a step could not be repeated.
    numbers = sorted((trial, group) for group, episodes in enumerate(groups) for trial in episodes)
    for index, (trial, group) in enumerate(numbers):
        episode = groups[group][trial]
        if not episode.trainable or episode.reward is None or trial not in advantages[group]:
            continue
        check_sampling(episode, temperature)
        rows = episode.rows(oldest)
        total = sum(sum(row.response_mask) for row in rows)
        weight = 1.0 / total if length == "episode" and total else 1.0
        found += [_sample(row, advantages[group][trial], episode.reward.value, weight, index, version) for row in rows]
    return found


def _sample(row: Row, advantage: float, reward: float, weight: float, episode: int, version: int) -> Sample:
    given = len(row.prompt_ids)
    sampled = [v for v, on in zip(row.versions, row.response_mask, strict=True) if on]
    return Sample(
        ids=np.asarray(row.prompt_ids + row.response_ids, dtype=np.int64),
        mask=np.asarray((0,) * given + row.response_mask, dtype=np.bool_),
        recorded=np.asarray((0.0,) * given + row.logprobs, dtype=np.float32),
        advantage=advantage,
        reward=reward,
        weight=weight,
        episode=episode,
        staleness=max(0, version - min(sampled, default=version)),
    )


def narrows(sampling: Sampling) -> list[str]:
    """What leaves out tokens that the policy would have sampled: its logprobs are those of another distribution."""
    narrow = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return [name for name, is_narrow in narrow.items() if is_narrow]


def check_sampling(episode: Episode, temperature: float) -> None:
    """Raise TrainingFailed if its tokens come from another distribution than the one that is trained on."""
    expected = Sampling(temperature=temperature).reshapes
    for node in episode.nodes:
        if node.spans and node.sampling != expected and Sampling(**node.sampling).reshapes != expected:
            raise TrainingFailed(
                f"a rollout of task {episode.task.id!r} was sampled with {_listed(node.sampling)}, but what is trained "
                f"is the policy at {_listed(expected)}. Have the loop sample so, or set its `sampling` to what it does."
            )


def _listed(sampling: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items()) or "temperature 1"


def scale_of(samples: Sequence[Sample], length: str, longest: int) -> float:
    """What the sum of all tokens' losses is multiplied with."""
    episodes = len({sample.episode for sample in samples}) or 1
    if length == "token":
        return 1.0 / (sum(sample.tokens for sample in samples) or 1)
    return 1.0 / episodes if length == "episode" else 1.0 / (episodes * longest)


def split(samples: Sequence[Sample], parts: int, seed: str) -> list[list[Sample]]:
    """Parts of about as many episodes each, drawn by the seed; an episode is never torn apart."""
    episodes = sorted({sample.episode for sample in samples})
    if parts > 1:
        Random(seed).shuffle(episodes)
    found: list[list[Sample]] = []
    for part in range(min(parts, len(episodes))):
        mine = set(episodes[part::parts])
        found.append([sample for sample in samples if sample.episode in mine])
    return found


def micro_batches(samples: Sequence[Sample], most_tokens: int) -> list[list[Sample]]:
    """Sorted by length, so that little is padded, and as many together as fit."""
    found: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda one: -len(one.ids)):
        # The first of each is the longest.
        if found and (len(found[-1]) + 1) * len(found[-1][0].ids) <= most_tokens:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def shares(samples: Sequence[Sample], workers: int) -> list[list[Sample]]:
    """The samples dealt out so that each worker has about as many tokens."""
    hands: list[list[Sample]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for sample in sorted(samples, key=lambda one: -len(one.ids)):
        least = loads.index(min(loads))
        hands[least].append(sample)
        loads[least] += len(sample.ids)
    return hands
