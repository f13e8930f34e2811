"""Episodes before and after training: the same held-out tasks side by side, and the batches that were trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from loopwright.engines.tokenizer import Tokenizer
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rollouts
from loopwright.reports.formatting import number
from loopwright.reports.rollout.samples import EpisodeSample, sample
from loopwright.reports.training.digest import Pair, TrainingDigest, signed

_TOKENS = 1200
"""The most tokens shown of each episode: a page has many of them."""
_STEEP = 0.5
"""An episode with at least this share of its group's largest advantage is shaded strongly."""


@dataclass(frozen=True)
class SampleGroup:
    """Episodes side by side."""

    title: str
    note: str
    samples: tuple[EpisodeSample, ...]


def before_after(ledger: Ledger, digest: TrainingDigest, tokenizer: Tokenizer | None) -> list[SampleGroup]:
    """The episodes of a few held-out tasks in the first and in the last evaluation."""
    if digest.ends is None:
        return []
    groups = []
    for title, pair in _extremes(digest.pairs):
        by_number = {rollout.number: rollout for rollout in rollouts(ledger, [pair.before, pair.after])}
        episodes = []
        for end, trial in zip(digest.ends, (pair.before, pair.after), strict=True):
            when = f"after step {number(end.step)}" if end.step else "before training"
            if trial in by_number:
                episodes.append(sample(when, by_number[trial], tokenizer, most=_TOKENS))
        change = f"mean reward {number(pair.rewards[0], 3)} → {number(pair.rewards[1], 3)}"
        groups.append(SampleGroup(title, change, tuple(episodes)))
    return groups


def _extremes(pairs: Sequence[Pair]) -> list[tuple[str, Pair]]:
    """The held-out tasks with the largest gain, the median and the smallest gain."""
    ordered = sorted(pairs, key=lambda pair: (-pair.change, pair.before))
    if len(ordered) < 3:
        return [("Held-out task", pair) for pair in ordered]
    names = ("the largest gain", "the median", "the smallest gain" if ordered[-1].change >= 0 else "the largest loss")
    places = (0, len(ordered) // 2, len(ordered) - 1)
    return [(f"Held-out task with {name}", ordered[place]) for name, place in zip(names, places, strict=True)]


def trained_batches(ledger: Ledger, digest: TrainingDigest, tokenizer: Tokenizer | None) -> list[SampleGroup]:
    """The best and the worst rollout of a group of the first step that updated the policy, and of the last one."""
    rows = ledger.transaction.rows
    if not rows("SELECT 1 FROM sqlite_schema WHERE name = 'groups'"):
        return []
    batches = []
    for step in dict.fromkeys(each.step for each in (*digest.learned[:1], *digest.learned[-1:])):
        widest = rows(
            "SELECT groups.grp FROM groups JOIN trials ON trials.grp = groups.grp WHERE step = ? "
            "AND reward IS NOT NULL GROUP BY groups.grp ORDER BY max(reward) - min(reward) DESC, groups.grp LIMIT 1",
            (step,),
        )
        if not widest:
            continue
        numbers = rows("SELECT number FROM trials WHERE grp = ? ORDER BY number", widest[0])
        group = [r for r in rollouts(ledger, [trial for (trial,) in numbers]) if r.episode.reward is not None]
        baseline = [_reward(rollout) for rollout in group if rollout.episode.in_baseline]
        if not baseline or len(group) < 2:  # a single rollout cannot be better than its group
            continue
        mean = fsum(baseline) / len(baseline)
        largest = max(abs(_reward(rollout) - mean) for rollout in group)
        episodes = []
        for title, rollout in (("best", max(group, key=_reward)), ("worst", min(group, key=_reward))):
            advantage = _reward(rollout) - mean
            note = f"advantage {signed(advantage)}, against a group mean of {number(mean, 3)}"
            shade = f"{'up' if advantage > 0 else 'down'}{'2' if abs(advantage) >= _STEEP * largest else '1'}"
            caption = f"{title} of {number(len(group))}"
            css = shade if advantage else ""
            episodes.append(sample(caption, rollout, tokenizer, note=note, css=css, most=_TOKENS))
        title, note = f"What step {number(step)} was trained on", "the group with the widest range of rewards"
        batches.append(SampleGroup(title, note, tuple(episodes)))
    return batches


def _reward(rollout: Rollout) -> float:
    reward = rollout.episode.reward
    return 0.0 if reward is None else reward.value
