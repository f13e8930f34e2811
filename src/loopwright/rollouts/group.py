"""A group: a prompt and the rollouts that attempt it, and how a whole group is judged."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault
from loopwright.core.trial import Action, Reward, Trial
from loopwright.rollouts.judgers.judger_client import JudgerClient
from loopwright.rollouts.tasks.mix import Prompt

_MAX_TRIALS, MAX_TRIALS_IF_SHORT = 3, 10
"""How many trials a group may use, as multiples of its size."""


@dataclass
class Group:
    """A prompt in production: the episodes that count, and the trials that are not finished."""

    number: int
    prompt: Prompt
    size: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    """By trial number: those that count, including the policy's own failures."""
    in_flight: dict[int, Trial] = field(default_factory=dict)
    """Trials that are not finished, by number."""
    trials: int = 0
    """How many trials it has used, including replacements."""
    action: Action = field(default_factory=dict)
    """The recorded action of its trials."""
    last_failure: str = ""
    """Why the last trial that does not count was lost."""
    min_size: int = 1
    """How many judged episodes it needs to be used."""
    judging: "GroupJudging | None" = None
    """Judges the group as a whole; None if its episodes are judged one by one."""

    @property
    def missing(self) -> int:
        """How many more rollouts it needs."""
        return self.size - len(self.episodes) - len(self.in_flight)

    @property
    def judged(self) -> int:
        """How many of its episodes are judged and count."""
        return sum(episode.in_baseline for episode in self.episodes.values())

    @property
    def max_trials(self) -> int:
        """How many trials it may use: more if it has some judged episodes, but too few."""
        return (MAX_TRIALS_IF_SHORT if 0 < self.judged < self.min_size else _MAX_TRIALS) * self.size

    @property
    def baseline(self) -> float | None:
        """The mean reward of the episodes that count: one each, however many rows they have."""
        rewards = [e.reward.value for e in self.episodes.values() if e.in_baseline and e.reward is not None]
        return fmean(rewards) if rewards else None

    def add(self, trial: int, episode: Episode) -> None:
        """Add a finished episode. One that failed through no fault of the policy does not count."""
        if episode.fault in (None, Fault.POLICY):
            self.episodes[trial] = episode
        else:
            self.last_failure = episode.reason

    def version(self, default: int = 0, *, newest: bool = False) -> int:
        """The oldest (or newest) version of the policy that sampled any token of it; `default` without tokens."""
        versions = [span.version for e in self.episodes.values() for node in e.nodes for span in node.spans]
        return (max if newest else min)(versions, default=default)


@dataclass
class DiscardedGroups:
    """Groups that were produced since the last batch and are in no batch: `filtered`, `short` or `failed`."""

    groups: Counter[str] = field(default_factory=Counter)
    """How many, by status."""
    trials: int = 0
    rewards: list[float] = field(default_factory=list)
    """The rewards of their episodes that count."""
    last_failure: str = ""
    """Why the last lost trial failed."""

    def add(self, group: Group, status: str) -> None:
        """Count a group."""
        self.groups[status] += 1
        self.trials += group.trials
        self.rewards += [e.reward.value for e in group.episodes.values() if e.reward is not None]
        self.last_failure = group.last_failure or self.last_failure

    def __add__(self, other: "DiscardedGroups") -> "DiscardedGroups":
        return DiscardedGroups(
            self.groups + other.groups,
            self.trials + other.trials,
            self.rewards + other.rewards,
            other.last_failure or self.last_failure,
        )

    def __str__(self) -> str:
        failed, short, filtered = (self.groups[status] for status in ("failed", "short", "filtered"))
        parts = [f"{failed} failed"] if failed else []
        parts += [f"{short} had too few judged rollouts"] if short else []
        if parts and self.last_failure:
            parts[-1] += f" (the last: {self.last_failure})"
        return " and ".join([*parts, *([f"{filtered} had equal rewards"] if filtered else [])])


class GroupJudging:
    """Collects the episodes of a group until all have arrived, and judges them together."""

    def __init__(self, judger: JudgerClient, group: Group) -> None:
        self._judger, self._group = judger, group
        self._waiting: list[tuple[Episode, asyncio.Future[Reward]]] = []
        self._task: asyncio.Task[None] | None = None

    async def judge(self, episode: Episode) -> Reward:
        """The reward of this episode among the others of its group, or JudgeFailed."""
        entry: tuple[Episode, asyncio.Future[Reward]] = episode, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self.judge_if_complete()
        try:
            return await entry[1]
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def judge_if_complete(self) -> None:
        """Start judging if every unfinished trial of the group has delivered its episode."""
        if self._waiting and len(self._waiting) >= len(self._group.in_flight):
            waiting, self._waiting = self._waiting, []
            self._task = asyncio.create_task(self._judge(waiting))

    async def _judge(self, waiting: Sequence[tuple[Episode, "asyncio.Future[Reward]"]]) -> None:
        # Episodes that were judged before a crash are included, so that the others are compared with all.
        episodes = [*(episode for episode, _ in waiting), *self._group.episodes.values()]
        verdicts: Sequence[Reward | BaseException]
        try:
            verdicts = await self._judger.judge_group(episodes)
        except BaseException as error:  # noqa: BLE001  raised to everyone who waits
            verdicts = [error] * len(episodes)
        for (_, future), verdict in zip(waiting, verdicts, strict=False):
            if future.done():
                continue
            if isinstance(verdict, BaseException):
                future.set_exception(verdict)
            else:
                future.set_result(verdict)
