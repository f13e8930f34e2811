"""Reading a judge's verdict, strictly: what is not exactly one score within its bounds is no verdict."""

import json
import re
from typing import Any

from loopwright.rollouts.judgers.base import JudgeFailed

_LINE = re.compile(r"^[ \t>*#]*score[* \t]*:[* \t]*(-?\d+(?:\.\d+)?)[* \t.]*$", re.IGNORECASE | re.MULTILINE | re.ASCII)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL | re.IGNORECASE)
_MOST_CHARS = 200_000


def read_score(text: str, low: float, high: float) -> float:
    """The one score in a judge's answer: a JSON object with `score`, or one line `Score: n`; JudgeFailed otherwise."""
    # What a reasoning model thought before it answered is no verdict.
    answer = text.rpartition("</think>")[2].strip()
    if len(answer) > _MOST_CHARS:
        raise JudgeFailed(f"the judge wrote {len(answer)} characters; a verdict is shorter")
    score = _from_json(answer)
    if score is None:
        scores = _LINE.findall(answer)
        if len(scores) != 1:
            raise JudgeFailed(f"the judge gave {len(scores) or 'no'} scores: {answer[-200:]!r}")
        score = float(scores[0])
    if not low <= score <= high:
        raise JudgeFailed(f"the judge's score {score:g} is not within {low:g} and {high:g}")
    return score


def _from_json(answer: str) -> float | None:
    fenced = _FENCED.match(answer)
    try:
        found = json.loads(fenced[1] if fenced else answer, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    score = found.get("score") if isinstance(found, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise JudgeFailed(f"the judge's JSON has no number `score`: {answer[:200]!r}")
    return float(min(max(score, -1e300), 1e300))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JudgeFailed("the judge's JSON has a key twice, so it cannot be told which score is meant")
    return found


def _refuse(name: str) -> float:
    raise ValueError(name)
