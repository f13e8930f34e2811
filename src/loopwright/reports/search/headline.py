"""The head of a run's part of the report: the answer first, or why there is none."""

from collections.abc import Mapping, Sequence
from math import fsum
from statistics import stdev
from typing import Any

from loopwright.reports.links import trial_links
from loopwright.reports.live.policy import policy_answer, verdict
from loopwright.reports.markup import (
    Html,
    assignments,
    exact,
    html,
    join,
    measured,
    number,
    short,
    spread,
    table,
    unit_of,
)
from loopwright.reports.search.best import Candidate
from loopwright.reports.search.digest import Digest

_ROWS = 15


def answer(digest: Digest) -> Html:
    """What the run found out."""
    if not digest.trials:
        return html("<p class='note'>No trial has been started yet.</p>")
    if not digest.ok:
        return _nothing(digest)
    if digest.policy is not None:
        return policy_answer(digest.policy, digest.labels[0], _varied(digest))
    if digest.by_regime:
        return _for_each_regime(digest)
    if not digest.best.front:
        text = "{} trials succeeded, but no action did in all its repeats, so there is no answer."
        return html("<p class='note bad'>{}</p>", text.format(number(len(digest.ok))))
    if len(digest.labels) > 1:
        return _front(digest)
    return _single(digest, digest.best.front[0])


def headline(digest: Digest) -> str:
    """The answer in a few words, for the list of runs."""
    if not digest.ok:
        return "no trial succeeded" if digest.trials else "no trial yet"
    if digest.policy is not None:
        return verdict(digest.policy, digest.labels[0])
    if digest.by_regime:
        return f"an action for each of {number(len(digest.best.by_regime))} regimes"
    if len(digest.best.front) == 1:
        return measured(digest.best.front[0].reward, digest.labels[0])
    return f"{number(len(digest.best.front))} actions, none better in all objectives" if digest.best.front else "–"


def _nothing(digest: Digest) -> Html:
    failures = digest.failures()
    if not failures:
        return html("<p class='note'>No trial has ended yet.</p>")
    worst = failures[0]
    reason, like = worst.reasons[0]
    said = html(": <code>{}</code>", short(reason)) if reason else Html("")
    shared = f", {number(len(like))} of them for this reason" if 1 < len(like) < worst.count else ""
    return html(
        "<div class='note bad'><b>No trial succeeded.</b> Most often the outcome was <b>{}</b> "
        "(fault: {}; {} of {} trials{}){} {}</div>",
        worst.outcome,
        worst.fault,
        number(worst.count),
        number(digest.done or len(digest.trials)),
        shared,
        said,
        trial_links(digest.folder, like[:1]),
    )


def _single(digest: Digest, best: Candidate) -> Html:
    label = digest.labels[0]
    what = f"Best {label}"
    if len(best.regimes) > 1:
        what = f"Best action over {number(len(best.regimes))} of {number(len(digest.regimes))} regimes: mean {label}"
    elif len(digest.regimes) > 1:
        alone = short(assignments(best.regimes[0]), 80)
        what = f"Best {label}, measured under {alone} alone; {number(len(digest.regimes))} regimes were met"
    left = html(
        "<div><div class='what'>{}</div><div class='value'>{} <small>{}</small></div>{}{}<p class='muted'>{}</p></div>",
        what,
        number(best.reward),
        unit_of(label) if best.spread is None else f"± {number(best.spread, 2)} {unit_of(label)}",
        _range(digest, best),
        _gain(digest, best, label),
        trial_links(digest.folder, best.trials),
    )
    return html("<div class='answer'>{}<div>{}</div></div>", left, _action_table(digest, best))


def _range(digest: Digest, best: Candidate) -> Html:
    """How far its measurements lie apart under different regimes."""
    if len(best.regimes) < 2:
        return Html("")
    numbers = set(best.trials)
    rewards = [trial.reward.value for trial in digest.ok if trial.number in numbers and trial.reward]
    return html("<p class='muted'>single trials from {} to {}</p>", number(min(rewards)), number(max(rewards)))


def _gain(digest: Digest, best: Candidate, label: str) -> Html:
    first = digest.baseline(best)
    if first is None:
        return Html("")
    if first.trials[0] == best.trials[0]:
        text = "The first ok trial is still the best." if len(digest.ok) > 1 else "The only trial that succeeded."
        return html("<p class='muted'>{}</p>", text)
    against = f"against the first ok trial ({measured(first.reward, label)}, trial {number(first.trials[0])})"
    return html("<p><span class='gain'>{}</span> {}</p>", gain(first.reward, best.reward, label), against)


def gain(first: float, best: float, label: str = "") -> str:
    """How much better: a factor or a share where these make sense, otherwise the difference."""
    if first > 0 and best >= 2 * first:
        return f"{best / first:.3g} ×"
    if first * best > 0:
        return f"+{100 * (best - first) / abs(first):.3g} %"
    return f"+{measured(best - first, label)}"


def _action_table(digest: Digest, best: Candidate) -> Html:
    """Each parameter with its value, then what was measured with them."""
    varied = {name for trial in digest.ok for name, value in trial.action.items() if value != best.action.get(name)}
    rows = [
        html(
            "<tr class='{}'><td>{}</td><td class='mono long'>{}</td></tr>",
            "" if name in varied or not digest.ok[1:] else "fixed",
            name,
            short(exact(value), 2000),
        )
        for name, value in _in_scenario_order(digest, best.action)
    ]
    rows += [
        html("<tr class='measured'><td>{}</td><td>{}</td></tr>", name, value)
        for name, value in _metrics(digest, best).items()
        if name != digest.labels[0]
    ]
    note = "" if len(best.trials) == 1 else " (metrics: mean over its trials)"
    return html(
        "<div class='scroll'><table class='wide'><thead><tr><th scope='col'>parameter</th>"
        "<th scope='col'>value{}</th></tr></thead><tbody>{}</tbody></table></div>",
        note,
        join(rows),
    )


def _metrics(digest: Digest, best: Candidate) -> dict[str, str]:
    numbers = set(best.trials)
    found: dict[str, list[float]] = {}
    for trial in digest.ok:
        if trial.number in numbers:
            for name, value in trial.metrics.items():
                if isinstance(value, (int, float)):
                    found.setdefault(name, []).append(value)
    return {
        name: spread(fsum(values) / len(values), stdev(values), name) if len(values) > 1 else measured(values[0], name)
        for name, values in found.items()
    }


def _front(digest: Digest) -> Html:
    front = digest.best.front
    names = _searched(digest, front)
    shown = front if len(front) <= _ROWS else [front[i * (len(front) - 1) // (_ROWS - 1)] for i in range(_ROWS)]
    rows = [
        [
            *(_cell(measured(value, label)) for value, label in zip(candidate.objectives, digest.labels, strict=True)),
            *(_value(candidate.action, name) for name in names),
            trial_links(digest.folder, candidate.trials),
        ]
        for candidate in shown
    ]
    cut = f" Here are {_ROWS} of them, spread evenly." if len(front) > _ROWS else ""
    text = f"{number(len(front))} unbeaten actions: who wants more of one objective gets less of another.{cut}"
    if len(front) == 1:
        text = f"One action is best in all {len(digest.labels)} objectives."
    return html(
        "<div class='answer whole'><div class='what'>{}</div>{}</div>",
        text,
        table([*digest.labels, *names, "trial"], rows, "wide"),
    )


def _for_each_regime(digest: Digest) -> Html:
    found = digest.best.by_regime
    return html(
        "<div class='answer whole'><div class='what'>{}</div>{}</div>",
        f"The best action for each of {number(len(found))} regimes: the agent acts on the regime that it sees.",
        regime_table(digest, found),
    )


def regime_table(digest: Digest, found: Sequence[Candidate]) -> Html:
    """The best action of each regime."""
    ordered = sorted(found, key=lambda candidate: digest.order(candidate.regimes[0]))
    drawn = list(dict.fromkeys(name for candidate in found for name in candidate.regimes[0]))
    names = _searched(digest, found)
    rows = [
        [
            *(_value(candidate.regimes[0], name) for name in drawn),
            _cell(_with_spread(candidate, digest.labels[0])),
            *(_value(candidate.action, name) for name in names),
            trial_links(digest.folder, candidate.trials),
        ]
        for candidate in ordered[:_ROWS]
    ]
    more = html("<p class='muted'>And {} more regimes.</p>", number(len(found) - _ROWS)) if len(found) > _ROWS else ""
    return html("{}{}", table([*drawn, digest.labels[0], *names, "trial"], rows, "wide"), more or Html(""))


def _with_spread(candidate: Candidate, label: str) -> str:
    if candidate.spread is None:
        return measured(candidate.reward, label)
    return spread(candidate.reward, candidate.spread, label)


def _cell(text: str) -> Html:
    return html("<span class='number'>{}</span>", text)


def _value(values: Mapping[str, Any], name: str) -> Html:
    text = short(exact(values[name]), 120) if name in values else "–"
    return html("<span class='mono {}'>{}</span>", "number" if len(text) < 28 else "long", text)


def _searched(digest: Digest, candidates: Sequence[Candidate]) -> list[str]:
    """The parameters that were varied at all, in the order of the scenario."""
    every = {name for candidate in candidates for name in candidate.action}
    return [name for name in _varied(digest) if name in every]


def _varied(digest: Digest) -> list[str]:
    first = digest.ok[0].action
    varied = {n for trial in digest.ok for n in {*trial.action, *first} if trial.action.get(n) != first.get(n)}
    every = dict.fromkeys(name for trial in digest.ok for name in trial.action)
    return [name for name, _ in _in_scenario_order(digest, every) if name in varied]


def _in_scenario_order(digest: Digest, action: Mapping[str, Any]) -> list[tuple[str, Any]]:
    declared = digest.about.get("parameters")
    order = {name: place for place, name in enumerate(declared)} if isinstance(declared, dict) else {}
    return sorted(action.items(), key=lambda item: order.get(item[0], len(order)))
