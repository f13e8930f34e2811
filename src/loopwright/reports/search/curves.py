"""The learning curves of a search: one line per trial, those that were stopped early among them."""

import html
from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import evenly, number
from loopwright.selection.trials import StoredTrial

_DRAWN = 200
_POINTS = 100
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 220, 60, 20


def curves_svg(folder: Path, about: Mapping[str, Any], trials: Sequence[StoredTrial]) -> str:
    """A chart of the metric that the stop rule watched, as SVG; empty without a stop rule."""
    stop = about.get("stop")
    if not isinstance(stop, dict):
        return ""
    metric, lines = str(stop["metric"]), []
    try:
        with Ledger.read(folder / "ledger.db") as ledger:
            numbers = [n for (n,) in ledger.transaction.rows("SELECT trial FROM payloads WHERE kind = 'curve'")]
            drawn = dict.fromkeys(evenly(sorted(numbers), _DRAWN), "")
            drawn |= {trial.number: str(trial.outcome) for trial in trials if trial.number in drawn}
            for trial, outcome in drawn.items():
                curve = orjson.loads(ledger.payload(trial, "curve") or b"{}")
                values = curve.get("metrics", {}).get(metric, ())
                points = [
                    (s, v) for s, v in zip(curve.get("steps", ()), values, strict=False) if v is not None and s > 0
                ]
                if points:
                    lines.append((trial, outcome, evenly(points, _POINTS)))
    except (LoopwrightError, ValueError):
        return ""
    if not lines:
        return ""
    values = sorted(value for _, _, points in lines for _, value in points)
    low, high = values[len(values) // 50], values[-1 - len(values) // 50]
    last = max(step for _, _, points in lines for step, _ in points)

    def place(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * (log10(step) / log10(last) if last > 1 else 0.5)
        share = (min(max(value, low), high) - low) / (high - low) if high > low else 0.5
        return f"{x:.1f},{(_HEIGHT - _BOTTOM) * (1 - share) + 4:.1f}"

    # Complete trials last, so that they are on top.
    ordered = sorted(lines, key=lambda line: line[1] == Outcome.OK)
    paths = "".join(
        f"<polyline fill='none' stroke='currentColor' stroke-width='1.2' "
        f"opacity='{1 if outcome == Outcome.OK else 0.3}' "
        f"points='{' '.join(place(*point) for point in points)}'>"
        f"<title>trial {trial}, {html.escape(str(outcome))}</title></polyline>"
        for trial, outcome, points in ordered
    )
    labels = f"<text x='0' y='12'>{number(high)}</text><text x='0' y='{_HEIGHT - _BOTTOM}'>{number(low)}</text>"
    labels += f"<text x='{_LEFT}' y='{_HEIGHT}'>step 1</text>"
    labels += f"<text x='{_WIDTH}' y='{_HEIGHT}' text-anchor='end'>step {last}</text>"
    return (
        f"<svg class='curves' viewBox='0 0 {_WIDTH} {_HEIGHT + 4}' role='img' font-size='11' fill='currentColor' "
        f"aria-label='{html.escape(metric, quote=True)} by step'>{labels}{paths}</svg>"
    )
