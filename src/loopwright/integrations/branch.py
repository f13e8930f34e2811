"""One row of an episode, for trainers that accept one answer per prompt."""

from typing import Literal

from loopwright.core.episode import Episode, Row
from loopwright.core.errors import LoopwrightError

Branches = Literal["mask", "main", "refuse"]
"""How to treat a rollout with several rows: use none of them, use the row with the most sampled tokens, or raise an
error. Tokens that are not used are counted as left out."""


class SeveralRows(LoopwrightError, ValueError):
    """A rollout has more rows than the trainer accepts."""


class NoReward(LoopwrightError, RuntimeError):
    """A rollout has no reward, which the trainer cannot represent."""


def one_row(episode: Episode, branches: Branches) -> tuple[Row | None, int]:
    """The row for the trainer, or None, and the number of sampled tokens in other rows."""
    rows = episode.rows()
    if len(rows) > 1 and branches == "refuse":
        raise SeveralRows(
            f"the rollout of task {episode.task.id!r} has {len(rows)} branches (it retried, compacted its history or "
            'had sub-agents), but this trainer accepts one answer per prompt. Set branches="main" to train only on the '
            'branch with the most sampled tokens, branches="mask" to train on none of them, or train with '
            "`loopwright run`, which uses all branches."
        )
    main = max(rows, key=lambda row: sum(row.response_mask), default=None)
    if len(rows) > 1 and branches == "mask":
        main = None
    return main, sum(sum(row.response_mask) for row in rows if row is not main)
