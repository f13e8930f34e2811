"""One row of an episode, for trainers that take one answer per prompt."""

from typing import Literal

from loopwright.core.episode import Episode, Row
from loopwright.core.errors import LoopwrightError

Branches = Literal["refuse", "main"]
"""What becomes of a rollout with several rows: an error, or its row with the most sampled tokens, and the rest counted
as left out."""


class SeveralRows(LoopwrightError, ValueError):
    """A rollout has more rows than the trainer can be given."""


class NoReward(LoopwrightError, RuntimeError):
    """A rollout stays without a reward, and the trainer has no word for that."""


def one_row(episode: Episode, branches: Branches) -> tuple[Row | None, int]:
    """The row that a trainer is given, and how many sampled tokens are in others; no row where nothing was sampled."""
    rows = episode.rows()
    if len(rows) > 1 and branches == "refuse":
        raise SeveralRows(
            f"the rollout of task {episode.task.id!r} has {len(rows)} branches (it retried, compacted its history or "
            'had sub-agents), but this trainer takes one answer per prompt. Say branches="main" to train on the branch '
            "with the most sampled tokens and leave the others out, or train with `loopwright run`, which takes all."
        )
    main = max(rows, key=lambda row: sum(row.response_mask), default=None)
    return main, sum(sum(row.response_mask) for row in rows if row is not main)
