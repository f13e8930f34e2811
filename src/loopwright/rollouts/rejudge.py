"""Rejudging: another judger scores the stored episodes, and the changes are summarised.

Nothing is run again and no reward is overwritten. If the new judger fails, the verdict is missing, which is not a zero.
"""

import asyncio
import heapq
import tomllib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import fsum
from pathlib import Path
from typing import Any

from loopwright.core.errors import Problem, ScenarioError, sentence
from loopwright.core.registry import look_for_types
from loopwright.core.trial import Reward
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, groups_of
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.judgers import JudgerClient, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed, JudgerConfig

_LARGEST = 10
_TINY = 1e-9


def read_judger(file: Path) -> JudgerConfig:
    """The judger in a TOML file: its top level, or its `[judger]` table. A ScenarioError lists everything wrong."""
    try:
        raw = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ScenarioError(file, [Problem("", f"cannot be read: {error.strerror}. Give a TOML file.")]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(file, [Problem("", f"is not TOML: {sentence(error)}")]) from error
    key = "judger" if "judger" in raw else ""
    look_for_types(raw, file.absolute().parent)
    try:
        config = parse_judger(raw.get("judger", raw))
    except ValueError as error:
        raise ScenarioError(file, [Problem(key, sentence(error))]) from error
    if problems := config.problems(file.absolute().parent):
        raise ScenarioError(file, problems)
    return config


@dataclass(frozen=True)
class Change:
    """The rewards of one episode before and after; None if a judger gave none."""

    trial: int
    group: int
    task: str
    before: Reward | None
    after: Reward | None
    reason: str = ""

    @property
    def difference(self) -> float | None:
        """The change of the reward, if there are two."""
        return None if self.before is None or self.after is None else self.after.value - self.before.value

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        before = None if self.before is None else self.before.value
        after, parts = (None, {}) if self.after is None else (self.after.value, self.after.parts)
        facts = {"trial": self.trial, "group": self.group, "task": self.task}
        return {**facts, "before": before, "after": after, "parts": parts, "reason": self.reason}


@dataclass
class Changes:
    """A summary of what a new judger changes. Its size does not grow with the number of episodes."""

    episodes: int = 0
    skipped: int = 0
    """Episodes that cannot be judged, because the rollout itself was lost."""
    both: int = 0
    sum_before: float = 0.0
    sum_after: float = 0.0
    up: int = 0
    down: int = 0
    newly_scored: int = 0
    newly_failed: int = 0
    still_failed: int = 0
    groups: int = 0
    pairs: int = 0
    flipped_pairs: int = 0
    """Pairs of one group whose order is reversed."""
    flipped_signs: int = 0
    """Episodes that moved from above their group's mean to below it, or vice versa."""
    new_best: int = 0
    """Groups in which none of the best episodes is best any more."""
    parts: dict[str, float] = field(default_factory=dict)
    """Sum of each part of the new rewards, over the episodes that both judgers scored."""
    reasons: dict[str, int] = field(default_factory=dict)
    _largest: list[tuple[float, int, Change]] = field(default_factory=list)

    @property
    def changed(self) -> int:
        """How many rewards changed."""
        return self.up + self.down

    @property
    def means(self) -> tuple[float, float] | None:
        """Before and after, over the episodes that both judgers scored: only these can be compared."""
        return (self.sum_before / self.both, self.sum_after / self.both) if self.both else None

    @property
    def part_means(self) -> dict[str, float]:
        """The contribution of each part to the mean after."""
        return {name: total / self.both for name, total in self.parts.items()}

    @property
    def largest(self) -> list[Change]:
        """The largest changes."""
        return [change for *_, change in sorted(self._largest, reverse=True)]

    def add(self, group: Sequence[Change]) -> None:
        """Count the changes of a group."""
        self.groups += 1
        for change in group:
            self._count(change)
        scored = [(c.before.value, c.after.value) for c in group if c.before is not None and c.after is not None]
        self._compare(scored)

    def _count(self, change: Change) -> None:
        self.episodes += 1
        difference = change.difference
        if change.after is None:
            self.still_failed += change.before is None
            self.newly_failed += change.before is not None
            if change.reason in self.reasons or len(self.reasons) < _LARGEST:
                self.reasons[change.reason] = self.reasons.get(change.reason, 0) + 1
            return
        self.newly_scored += change.before is None
        if change.before is None or difference is None:
            return
        self.both += 1
        self.sum_before += change.before.value
        self.sum_after += change.after.value
        for name, value in change.after.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self.up += difference > _TINY
        self.down += difference < -_TINY
        if abs(difference) > _TINY:
            heapq.heappush(self._largest, (abs(difference), -change.trial, change))
            if len(self._largest) > _LARGEST:
                heapq.heappop(self._largest)

    def _compare(self, scored: Sequence[tuple[float, float]]) -> None:
        if len(scored) < 2:
            return
        for (before, after), (other_before, other_after) in combinations(scored, 2):
            self.pairs += 1
            self.flipped_pairs += _sign(before - other_before) * _sign(after - other_after) < 0
        means = [fsum(column) / len(scored) for column in zip(*scored, strict=True)]
        self.flipped_signs += sum(_sign(b - means[0]) * _sign(a - means[1]) < 0 for b, a in scored)
        best_before, best_after = (
            {index for index, value in enumerate(column) if value >= max(column) - _TINY}
            for column in zip(*scored, strict=True)
        )
        self.new_best += not best_before & best_after

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        names = ("episodes", "skipped", "both", "changed", "up", "down", "newly_scored", "newly_failed", "still_failed")
        ranks = ("groups", "pairs", "flipped_pairs", "flipped_signs", "new_best")
        before, after = self.means or (None, None)
        return {
            **{name: getattr(self, name) for name in (*names, *ranks)},
            "mean_before": before,
            "mean_after": after,
            "parts": self.part_means,
            "largest": [change.as_json() for change in self.largest],
            "reasons": self.reasons,
        }


async def rejudge(ledger: Ledger, config: JudgerConfig, scenario_dir: Path) -> AsyncGenerator[tuple[list[Change], int]]:
    """The changes of the stored episodes, group by group, each with the number of episodes that cannot be judged."""
    client = build_judger_client(config, scenario_dir)
    # As many groups at a time as keep the judger busy, however small they are.
    max_episodes = 2 * config.capacity() * max(1, config.workers)
    running: set[asyncio.Task[tuple[list[Change], int]]] = set()
    try:
        await client.start()
        for group in groups_of(ledger):
            running.add(asyncio.create_task(_judge(client, group)))
            if len(running) * len(group) >= max_episodes:
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    yield await task
        for last in asyncio.as_completed(list(running)):
            yield await last
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await client.close()


async def _judge(client: JudgerClient, group: Sequence[Rollout]) -> tuple[list[Change], int]:
    rollouts = [rollout for rollout in group if rollout.judgeable]
    verdicts = await client.judge_group([rollout.episode for rollout in rollouts]) if rollouts else []
    changes = [_change(rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]
    return changes, len(group) - len(rollouts)


def _change(rollout: Rollout, verdict: Reward | JudgeFailed) -> Change:
    episode = rollout.episode
    return Change(
        trial=rollout.number,
        group=episode.group,
        task=episode.task.id,
        before=episode.reward,
        after=None if isinstance(verdict, JudgeFailed) else verdict,
        reason=str(verdict) if isinstance(verdict, JudgeFailed) else "",
    )


def describe(config: JudgerConfig, file: Path, changes: Changes | None) -> Mapping[str, Any]:
    """The record of a rejudging: the judger and its changes, which are None until it is finished."""
    summary = None if changes is None else changes.as_json()
    return {"file": str(file), "judger": config.model_dump(mode="json"), "changes": summary}


def _sign(value: float) -> int:
    return 0 if abs(value) <= _TINY else 1 if value > 0 else -1
