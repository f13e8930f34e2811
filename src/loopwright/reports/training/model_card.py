"""The model card of an exported policy: what it was trained on, how far, for which reward, and how to check it."""

from typing import Any

import orjson

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import EVALUATED
from loopwright.reports.formatting import counted, number
from loopwright.reports.training.digest import read_training, verdict, warnings


def model_card(ledger: Ledger, model: str) -> str:
    """The text of `README.md`, in the format of the hub."""
    digest = read_training(ledger)
    settings = "\n".join(f"| `{name}` | `{_text(value)}` |" for name, value in digest.agent.items())
    caveats = "".join(f"- {line}\n" for line in warnings(digest)) or "- None were noticed.\n"
    # Logprobs of stale rollouts also differ because the policy has changed since.
    fresh = [step.numbers for step in digest.train if not step.numbers.get("staleness")]
    differences = [value for numbers in fresh if (value := numbers.get("mismatch_max")) is not None]
    mismatch = ""
    if differences:
        largest, steps = number(max(differences)), counted(len(differences), "step")
        mismatch = (
            f"In {steps} without stale rollouts, recorded and recomputed logprobs of a token differed by at most "
            f"{largest}.\n"
        )
    return f"""---
library_name: transformers
tags: [loopwright, reinforcement-learning]
---
# {digest.name}

A policy trained with Loopwright ({digest.agent.get("type", "")}) from `{model}`.

## Steps and reward
{number(digest.last_step)} of {number(digest.planned)} steps, on {number(digest.trained_rollouts)} of its own rollouts.
{verdict(digest)}

Judger: `{_text(digest.part("judger"))}`

## Data
{_data(ledger)}

## Caveats
{caveats}
## Audit
{mismatch}`loopwright audit {digest.folder.parent.name}` recomputes the recorded logprobs from the checkpoints.

## Settings
| | |
|---|---|
{settings}
"""


def _data(ledger: Ledger) -> str:
    """The tasks of each source with a reward, in training and in evaluations."""
    rows = ledger.transaction.rows(
        f"SELECT {EVALUATED} IS NULL, json_extract(action, '$.source'), "
        "count(DISTINCT json_extract(action, '$.index')), count(*) FROM trials WHERE reward IS NOT NULL "
        "GROUP BY 1, 2 ORDER BY 1 DESC, 2"
    )
    return "\n".join(
        f"- {'Training' if is_training else 'Evaluation'} rollouts on `{source.removeprefix('eval:')}`: "
        f"{number(rollouts)} of {counted(tasks, 'task')}."
        for is_training, source, tasks, rollouts in rows
    )


def _text(value: Any) -> str:
    return orjson.dumps(value, default=str).decode().replace("|", "\\|")
