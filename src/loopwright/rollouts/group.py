"""A group: a prompt and the rollouts that attempt it, which are compared with one another."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from loopwright.core.episode import Episode
from loopwright.core.reward import Reward
from loopwright.core.trial import Action, Trial
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.tasks.mix import Prompt


class EpisodeJudge(Protocol):
    """How episodes are judged, near or far."""

    @property
    def compares(self) -> bool:
        """Whether it judges whole groups."""
        ...

    async def start(self) -> None:
        """Have its workers ready."""
        ...

    async def judge(self, episode: Episode) -> Reward:
        """The reward of an episode, or JudgeFailed."""
        ...

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Reward | JudgeFailed]:
        """The rewards of a whole group, each a verdict or the reason why there is none."""
        ...

    async def close(self) -> None:
        """End its workers."""
        ...


@dataclass
class Group:
    """A prompt under way: what has ended and counts, and what has not."""

    number: int
    prompt: Prompt
    size: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    """By trial number: those that count, the policy's own failures included."""
    flying: dict[int, Trial] = field(default_factory=dict)
    """Trials that have not ended."""
    trials: int = 0
    """How many were numbered, refills included."""
    action: Action = field(default_factory=dict)
    """What the ledger has its trials under."""
    lost: str = ""
    """Why the last sample that does not count was lost."""
    bench: "GroupJudging | None" = None

    @property
    def missing(self) -> int:
        """How many more rollouts it takes."""
        return self.size - len(self.episodes) - len(self.flying)

    @property
    def baseline(self) -> float | None:
        """The mean reward of those that count: one per rollout, into however many rows it falls."""
        rewards = [e.reward.value for e in self.episodes.values() if e.in_baseline and e.reward is not None]
        return fmean(rewards) if rewards else None

    def version(self, now: int = 0, *, newest: bool = False) -> int:
        """The oldest version of the policy, or the newest, that sampled any of it; `now` if none did."""
        spans = [span.version for e in self.episodes.values() for node in e.nodes for span in node.spans]
        return (max if newest else min)(spans, default=now)


@dataclass
class DiscardedGroups:
    """What was produced since the batch before and is in none: `filtered` groups, and those that `failed`."""

    groups: Counter[str] = field(default_factory=Counter)
    """How many, by what became of them."""
    trials: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of the rollouts among them that count."""
    why: str = ""
    """Why the last sample was lost, if any was."""

    def add(self, group: Group, status: str) -> None:
        """One more group."""
        self.groups[status] += 1
        self.trials += group.trials
        self.rewards += [e.reward.value for e in group.episodes.values() if e.reward is not None]
        self.why = group.lost or self.why

    def __str__(self) -> str:
        failed, filtered = self.groups["failed"], self.groups["filtered"]
        said = [f"{failed} failed" + (f" (the last one: {self.why})" if self.why else "")] if failed else []
        return " and ".join(said + ([f"{filtered} had equal rewards"] if filtered else []))


class GroupJudging:
    """Where the episodes of a group wait until all have come that are compared with one another."""

    def __init__(self, judge: EpisodeJudge, group: Group) -> None:
        self._judge, self._group = judge, group
        self._waiting: list[tuple[Episode, asyncio.Future[Reward]]] = []
        self._judging: asyncio.Task[None] | None = None

    async def reward(self, episode: Episode) -> Reward:
        """The reward of this episode among the others of its group, or JudgeFailed."""
        seat: tuple[Episode, asyncio.Future[Reward]] = episode, asyncio.get_running_loop().create_future()
        self._waiting.append(seat)
        self.check()
        try:
            return await seat[1]
        finally:
            if seat in self._waiting:
                self._waiting.remove(seat)

    def check(self) -> None:
        """Judge, if nobody is missing any more."""
        if self._waiting and len(self._waiting) >= len(self._group.flying):
            waiting, self._waiting = self._waiting, []
            self._judging = asyncio.create_task(self._compare(waiting))

    async def _compare(self, waiting: Sequence[tuple[Episode, "asyncio.Future[Reward]"]]) -> None:
        # Those that were judged before a crash are shown again, so that the others are compared with all.
        episodes = [*(episode for episode, _ in waiting), *self._group.episodes.values()]
        verdicts: Sequence[Reward | BaseException]
        try:
            verdicts = await self._judge.judge_group(episodes)
        except BaseException as error:  # noqa: BLE001  it reaches everyone who waits
            verdicts = [error] * len(episodes)
        for (_, seat), verdict in zip(waiting, verdicts, strict=False):
            if seat.done():
                continue
            if isinstance(verdict, BaseException):
                seat.set_exception(verdict)
            else:
                seat.set_result(verdict)
