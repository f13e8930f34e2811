"""A trained policy beside the best static action, regime by regime: which of the two wins."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

from loopwright.core.trial import Regime
from loopwright.reports.markup import Html, assignments, exact, html, join, measured, number, short, table

_COLUMNS = 6
"""As many parameters have a column each."""


@dataclass(frozen=True)
class Side:
    """What one of the two did under a regime; no reward where a measurement failed."""

    action: Mapping[str, Any]
    reward: float | None
    trials: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The evaluation at the end of a training."""

    rows: tuple[tuple[Regime, Side, Side | None], ...]

    @cached_property
    def common(self) -> list[tuple[float, float]]:
        """(policy, static) under each regime where both were measured: only these can be compared."""
        pairs = ((policy.reward, static.reward) for _, policy, static in self.rows if static is not None)
        return [(own, other) for own, other in pairs if own is not None and other is not None]

    @property
    def means(self) -> tuple[float, float] | None:
        """The mean over those regimes, of the policy and of the static action."""
        if not self.common:
            return None
        own, other = zip(*self.common, strict=True)
        return fsum(own) / len(own), fsum(other) / len(other)

    @property
    def alone(self) -> float | None:
        """The policy's own mean, where nothing stands beside it."""
        rewards = [policy.reward for _, policy, _ in self.rows if policy.reward is not None]
        return fsum(rewards) / len(rewards) if rewards else None

    @property
    def own_trials(self) -> set[int]:
        """The trials in which the policy was measured."""
        return {trial for _, policy, _ in self.rows for trial in policy.trials}

    @property
    def static(self) -> Mapping[str, Any]:
        """The static action; it is the same under each regime."""
        return next((static.action for _, _, static in self.rows if static is not None), {})


def comparison(state: Any) -> Comparison | None:
    """What the ledger's state says of the policy; None if it was not evaluated."""
    told = state.get("regimes") if isinstance(state, dict) else None
    if not isinstance(told, list) or not told:
        return None
    rows = [
        (row.get("regime") or {}, _side(row["policy"]), _side(row["static"]) if row.get("static") else None)
        for row in told
    ]
    return Comparison(tuple(rows))


def _side(told: Mapping[str, Any]) -> Side:
    return Side(told.get("action") or {}, told.get("reward"), tuple(told.get("trials") or ()))


def verdict(found: Comparison, label: str) -> str:
    """Which wins, in a few words."""
    if found.means is None:
        alone = found.alone
        return "the policy failed under every regime" if alone is None else f"policy {measured(alone, label)}"
    own, other = found.means
    name = "the policy wins" if own > other else "the static action wins" if other > own else "a tie"
    return f"{name}: {measured(own, label)} against {measured(other, label)}"


def policy_answer(found: Comparison, label: str, varied: list[str]) -> Html:
    """The verdict, then the evidence for it; `varied` are the parameters that there was a choice of."""
    parts = [_verdict(found, label), _table(found, label, varied), _static(found, varied)]
    return html("<div class='answer whole'>{}</div>", join(parts))


def _verdict(found: Comparison, label: str) -> Html:
    where = _regimes(len(found.common)) if found.common else _regimes(len(found.rows))
    if found.means is None:
        text = (
            "The policy failed under every regime."
            if found.alone is None
            else f"The policy's mean {label} over {where}"
        )
        value = Html("") if found.alone is None else html("<div class='value'>{}</div>", measured(found.alone, label))
        return html(
            "<div class='what'>{}</div>{}<p class='muted'>No static action was measured beside it.</p>", text, value
        )
    own, other = found.means
    better, css = ("The policy wins", "gain") if own > other else ("The best static action wins", "loss")
    better, css = ("Neither wins", "muted") if own == other else (better, css)
    each = sum(policy > static for policy, static in found.common)
    left = len(found.rows) - len(found.common)
    note = f" Left out: {_regimes(left)} where one of them failed." if left else ""
    return html(
        "<div class='what'>Mean {} of the policy over {}</div><div class='value'>{}</div>"
        "<p><span class='{}'>{}</span>: {} against {} of the best static action. It is better under {} of {}.{}</p>",
        label,
        where,
        measured(own, label),
        css,
        better,
        measured(own, label),
        measured(other, label),
        number(each),
        where,
        note,
    )


def _table(found: Comparison, label: str, varied: list[str]) -> Html:
    drawn = list(dict.fromkeys(name for regime, _, _ in found.rows for name in regime))
    chosen = list(dict.fromkeys(name for _, policy, _ in found.rows for name in _only(policy.action, varied)))
    apart = len(chosen) <= _COLUMNS
    rows = []
    for regime, policy, static in found.rows:
        action = [_mono(policy.action.get(name)) for name in chosen]
        text = html("<span class='mono'>{}</span>", short(assignments(_only(policy.action, varied)), 200))
        own, other = policy.reward, None if static is None else static.reward
        cells = [*(_mono(regime.get(name)) for name in drawn), *(action if apart else [text])]
        rows.append([*cells, *_rewards(own, other, label, measured_both=static is not None), _trials(policy, static)])
    if found.means and len(found.rows) > 1:
        blank = [Html("")] * (len(drawn) + (len(chosen) if apart else 1) - 1)
        rows.append([html("<b>mean</b>"), *blank, *_rewards(*found.means, label, measured_both=True), Html("")])
    head = [*drawn, *(chosen if apart else ["the policy's action"]), "policy", "static", "trials"]
    return table(head, rows, "wide compared")


def _rewards(own: float | None, other: float | None, label: str, *, measured_both: bool) -> list[Html]:
    """Both rewards, the better one marked."""
    first = own is not None and other is not None and own > other
    second = own is not None and other is not None and other > own
    beside = _reward(other, label, winner=second) if measured_both else html("–")
    return [_reward(own, label, winner=first), beside]


def _trials(policy: Side, static: Side | None) -> Html:
    numbers = sorted({*policy.trials, *(static.trials if static else ())})
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return html("<span class='number'>{}–{}</span>", number(numbers[0]), number(numbers[-1]))
    return html("{}", ", ".join(number(one) for one in numbers) or "–")


def _static(found: Comparison, varied: list[str]) -> Html:
    if not found.static:
        return Html("")
    action = short(assignments(_only(found.static, varied)), 400)
    return html(
        "<p class='muted'>The best static action, the same under every regime: <span class='mono'>{}</span></p>", action
    )


def _only(action: Mapping[str, Any], varied: list[str]) -> dict[str, Any]:
    """What there was to choose; all of it where nothing is known to vary."""
    return {name: value for name, value in action.items() if name in varied} or dict(action)


def _mono(value: Any) -> Html:
    return html("<span class='mono number'>{}</span>", "–" if value is None else short(exact(value), 80))


def _reward(value: float | None, label: str, *, winner: bool) -> Html:
    if value is None:
        return html("<span class='muted'>failed</span>")
    return html("<span class='number{}'>{}</span>", " best" if winner else "", measured(value, label))


def _regimes(count: int) -> str:
    return "1 regime" if count == 1 else f"{number(count)} regimes"
