"""One run's part of the report: the answer, then the evidence for it."""

import shlex
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from loopwright.core.outcome import Outcome
from loopwright.reports.background import part, provenance, resources
from loopwright.reports.links import trial_links
from loopwright.reports.live.digest import LiveDigest
from loopwright.reports.live.page import live_answer, live_notes, live_regimes, live_thinned
from loopwright.reports.markup import Html, duration, html, join, number, short, table
from loopwright.reports.rollout.digest import RolloutDigest
from loopwright.reports.rollout.page import (
    rollout_answer,
    rollout_facts,
    rollout_faults,
    rollout_groups,
    rollout_key,
    rollout_phases,
    rollout_sources,
    rollout_tasks,
    rollout_thinned,
)
from loopwright.reports.rollout.samples import samples
from loopwright.reports.search.charts import COLOURED, DRAWN
from loopwright.reports.search.digest import Digest, Failure
from loopwright.reports.search.headline import answer, regime_table
from loopwright.reports.training.before_after import before_after
from loopwright.reports.training.digest import TrainingDigest
from loopwright.reports.training.page import (
    training_answer,
    training_evaluations,
    training_facts,
    training_key,
    training_level,
    training_settings,
)

_PARAMETERS = 24
_REASONS = 4
_REGIMES = 24


def run_section(digest: Digest, place: int, chart: Mapping[str, Any], output: Path) -> Html:
    """Everything about one run. `place` is where its chart data stand in the page."""
    parts = [
        html("<div class='title'><h2>{}</h2>{}</div>", digest.name, status(digest)),
        _what(digest),
        _trouble(digest, output),
        answer(digest),
        _summary(digest),
        _fronts(digest, place),
        _progress(digest, place, chart),
        _parameters(digest, place, chart),
        _regimes(digest, place),
        _failures(digest),
        resources(digest),
        provenance(digest),
    ]
    return html("<section class='run' id='run-{}'>{}</section>", place + 1, join(parts, "\n"))


def live_section(digest: LiveDigest, place: int, chart: dict[str, Any], output: Path) -> Html:
    """Everything about one live run: no configuration is best there, so what counts is how the returns grew."""
    parts = [
        html("<div class='title'><h2>{}</h2>{}</div>", digest.name, status(digest)),
        _what(digest),
        _trouble(digest, output),
        live_answer(digest),
        _summary(digest),
        _growth(digest, place, chart),
        live_regimes(digest),
        _failures(digest),
        provenance(digest),
    ]
    return html("<section class='run' id='run-{}'>{}</section>", place + 1, join(parts, "\n"))


def rollout_section(digest: RolloutDigest, place: int, chart: dict[str, Any], output: Path) -> Html:
    """Everything about one rollout run: how its episodes were judged, and samples of them."""
    parts = [
        html("<div class='title'><h2>{}</h2>{}</div>", digest.name, status(digest)),
        _what_rolls(digest),
        _trouble(digest, output),
        rollout_answer(digest),
        rollout_facts(digest),
        _rewards(digest, place, chart),
        rollout_sources(digest),
        rollout_faults(digest),
        rollout_groups(digest),
        rollout_phases(digest),
        rollout_tasks(digest),
        samples(digest.folder, part(digest.rollout, "engine")),
        provenance(digest),
    ]
    return html("<section class='run' id='run-{}'>{}</section>", place + 1, join(parts, "\n"))


def training_section(digest: TrainingDigest, place: int, chart: dict[str, Any], output: Path) -> Html:
    """Everything about one training run, in the order of a lab notebook: verdict, curves, episodes, settings."""
    parts = [
        html("<div class='title'><h2>{}</h2>{}</div>", digest.name, status(digest)),
        _what_rolls(digest),
        _trouble(digest, output),
        training_answer(digest),
        training_facts(digest),
        _curves(place, chart),
        training_evaluations(digest),
        before_after(digest, place),
        html("<h2 class='part'>Rollouts trained on</h2>") if digest.rolled.total.ended else Html(""),
        rollout_sources(digest),
        rollout_faults(digest),
        rollout_groups(digest),
        rollout_phases(digest),
        rollout_tasks(digest),
        training_settings(digest),
        provenance(digest),
    ]
    return html("<section class='run' id='run-{}'>{}</section>", place + 1, join(parts, "\n"))


def status(digest: Digest) -> Html:
    """How far the run got, in a word."""
    if digest.failure:
        return html("<span class='chip bad'>failed</span>")
    if digest.trouble:
        return html("<span class='chip bad'>ledger damaged</span>")
    if digest.complete:
        return html(
            "<span class='chip {}'>{}</span>",
            *(("good", "finished") if digest.succeeded else ("bad", "without a result")),
        )
    return html("<span class='chip open'>in progress or interrupted</span>")


def _what(digest: Digest) -> Html:
    agent, workload = part(digest.about, "agent"), part(digest.about, "workload")
    said = []
    if agent.get("type"):
        seed = f", seed {agent['seed']}" if "seed" in agent else ""
        said.append(html("agent <b>{}</b>{}", agent["type"], seed))
    if isinstance(digest, LiveDigest):
        said.append(html("live environment <code>{}</code>", short(_server(workload), 400)))
    elif digest.ok or digest.about.get("objectives"):
        said.append(html("maximises {}", join((html("<code>{}</code>", label) for label in digest.labels), ", ")))
    command = workload.get("command") or workload.get("function")
    if command:
        said.append(html("<code>{}</code>", short(command, 400)))
    return html("<p class='muted'>{}</p>", join(said, " · ")) if said else Html("")


def _what_rolls(digest: RolloutDigest) -> Html:
    agent, rollout = part(digest.about, "agent"), digest.rollout
    said = [html("agent <b>{}</b>, seed {}", agent.get("type", "?"), agent.get("seed", 0))]
    said += [
        html("{} <b>{}</b>", name, kind)
        for name in ("loop", "judger", "engine")
        if (kind := part(rollout, name).get("type"))
    ]
    said.append(html("groups of {}", number(rollout.get("group_size", 1))))
    return html("<p class='muted'>{}</p>", join(said, " · "))


def _server(workload: Mapping[str, Any]) -> str:
    return str(workload.get("env_class") or workload.get("address") or "an object of the program's own")


def _trouble(digest: Digest, output: Path) -> Html:
    notes = []
    if digest.failure:
        *before, last = digest.failure.strip().splitlines()
        whole = html("<pre>{}</pre>", digest.failure.strip()) if before else Html("")
        said = short(last) if before else last
        notes.append(
            html("<div class='note bad'><b>The run ended with an error:</b> <code>{}</code>{}</div>", said, whole)
        )
    if digest.trouble:
        notes.append(html("<p class='note bad'>{}</p>", digest.trouble))
    if not digest.complete and not digest.trouble:
        text = html("resume with <code>loopwright resume {}</code>", shlex.quote(str(output)))
        state = "Once the cause is mended, " if digest.failure else "In progress or interrupted; "
        notes.append(html("<p class='note'>{}{}</p>", state, text))
    return join(notes)


def _summary(digest: Digest) -> Html:
    infeasible = digest.outcomes[Outcome.INFEASIBLE]
    failed = digest.done - (digest.succeeded if isinstance(digest, LiveDigest) else digest.outcomes[Outcome.OK])
    facts = {
        "done": f"{number(digest.done)} of {number(digest.budget)}" if digest.budget else number(digest.done),
        "ok": number(digest.succeeded if isinstance(digest, LiveDigest) else digest.outcomes[Outcome.OK]),
        "failed": number(failed) + (f" ({number(infeasible)} infeasible)" if infeasible else ""),
    }
    if not isinstance(digest, LiveDigest):
        facts["cached"] = number(digest.cached)
    if digest.unfinished:
        facts["in flight or aborted"] = number(digest.unfinished)
    if digest.wall_s is not None:
        facts["wall time"] = duration(digest.wall_s)
    if digest.repeats > 1:
        facts["repeats"] = number(digest.repeats)
    if digest.about.get("parallel") and not isinstance(digest, LiveDigest):
        facts["in parallel"] = number(digest.about["parallel"])
    listed = join(html("<div><dt>{}</dt><dd>{}</dd></div>", name, value) for name, value in facts.items())
    return html("<dl class='facts'>{}</dl>", listed) if digest.count else Html("")


# -- charts ---------------------------------------------------------------------------------------------------------


def _figure(kind: str, place: int, caption: Html, css: str = "", **more: int) -> Html:
    data = join(html(" data-{}='{}'", name, value) for name, value in more.items())
    return html(
        "<figure class='{}' data-chart='{}' data-run='{}'{}>{}<div class='plot'></div></figure>",
        css,
        kind,
        place,
        data,
        html("<figcaption>{}</figcaption>", caption) if caption else Html(""),
    )


def _progress(digest: Digest, place: int, chart: Mapping[str, Any]) -> Html:
    if len(digest.trials) < 2 or not digest.ok:
        return Html("")
    several = len(digest.labels) > 1
    each = [
        _figure(
            "progress",
            place,
            html("{}", label if several else ""),
            "medium" if several else "large",
            objective=objective,
        )
        for objective, label in enumerate(digest.labels)
    ]
    title = "Best so far" if several else f"Best {digest.labels[0]} so far"
    return html("<h3>{}</h3>{}{}{}", title, _key(digest, chart), join(each), _thinned(digest, chart))


def _growth(digest: LiveDigest, place: int, chart: dict[str, Any]) -> Html:
    if digest.episodes.total.count < 2:
        return Html("")
    returns = _figure(
        "progress", place, html("return <small>by the trial that ended the episode</small>"), "large", objective=0
    )
    lengths = _figure("progress", place, html("length <small>in steps</small>"), "medium", objective=1)
    return html("<h3>Episodes</h3>{}{}{}{}", live_notes(digest, chart), returns, lengths, live_thinned(digest, chart))


def _rewards(digest: RolloutDigest, place: int, chart: dict[str, Any]) -> Html:
    if digest.rolled.total.count < 2:
        return Html("")
    parts = [
        html("<h3>Rewards</h3>"),
        rollout_key(digest, chart),
        _figure("progress", place, Html(""), "large", objective=0),
        rollout_thinned(digest, chart),
    ]
    if len(chart["groups"]) > 1:
        caption = html("rewards of each group <small>mean, and from its worst to its best rollout</small>")
        parts.append(_figure("groups", place, caption, "medium"))
    figures = [
        _figure("histogram", place, html("{} <small>per rollout</small>", one["name"]), which=index)
        for index, one in enumerate(chart["histograms"])
    ]
    parts.append(html("<h3>Distributions</h3><div class='grid'>{}</div>", join(figures)))
    return join(parts)


def _curves(place: int, chart: dict[str, Any]) -> Html:
    if not chart["curves"]:
        return Html("")
    first, *more = [
        _figure(
            "curve",
            place,
            html("{} <small>{}</small>{}", curve["title"], curve["meaning"], key),
            "" if index else "large",
            which=index,
        )
        for index, curve in enumerate(chart["curves"])
        for key in [training_key(curve, () if index else chart["skipped"])]
    ]
    return html("<h3>Curves</h3>{}<div class='grid'>{}</div>{}", first, join(more), training_level(chart))


def _thinned(digest: Digest, chart: Mapping[str, Any]) -> Html:
    drawn, failed = len(chart["number"]), digest.done - len(digest.ok)
    notes = []
    if drawn < len(digest.ok):
        notes.append(
            f"{number(drawn)} of {number(len(digest.ok))} ok trials are drawn, as they are more than {number(DRAWN)}: "
            "all that set a record, the best, and an even share of the rest. The line is exact."
        )
    if len(chart["failed"]) < failed:
        notes.append(f"{number(len(chart['failed']))} of {number(failed)} failed trials have a tick.")
    return html("<p><small>{}</small></p>", " ".join(notes)) if notes else Html("")


def _key(digest: Digest, chart: Mapping[str, Any]) -> Html:
    """What the marks mean; only those that occur."""
    apart = 1 < len(digest.regimes) <= COLOURED
    line = "best so far"
    if len(digest.regimes) > COLOURED:
        line = "best so far under any regime"
    elif digest.repeats > 1:
        line = "best mean over repeats so far"
    marks = [("dot", "trial"), ("stroke", line)]
    if apart:
        marks = [(f"dot c{place}", name) for place, name in enumerate(chart["regimes"])]
        marks.append(("stroke plain", "best mean so far, under that regime"))
    if any(chart["cached"]):
        marks.append(("ring", "from the cache"))
    if chart["answer"]:
        marks.append(("gem", "the answer"))
    if any(floor is not None for floor in chart["floors"]):
        marks.append(("low", "below the axis"))
    if chart["failed"]:
        marks.append(("tick", "failed"))
    return html(
        "<div class='key'>{}</div>",
        join(html("<span><i class='{}'></i>{}</span>", mark, text) for mark, text in marks),
    )


def _fronts(digest: Digest, place: int) -> Html:
    if len(digest.labels) < 2 or len(digest.ok) < 2:
        return Html("")
    pairs = list(combinations(range(len(digest.labels)), 2))[:3]
    figures = [
        _figure(
            "front",
            place,
            html("{} <small>against</small> {}", digest.labels[y], digest.labels[x]),
            "large" if len(pairs) == 1 else "medium",
            x=x,
            y=y,
        )
        for x, y in pairs
    ]
    key = html(
        "<div class='key'><span><i class='gem'></i>unbeaten</span><span><i class='dot'></i>other trials</span></div>"
    )
    css = "" if len(pairs) == 1 else "grid"
    return html("<h3>Objectives against one another</h3>{}<div class='{}'>{}</div>", key, css, join(figures))


def _parameters(digest: Digest, place: int, chart: Mapping[str, Any]) -> Html:
    found = chart["parameters"]
    if not found or len(digest.ok) < 3:
        return Html("")
    figures = [
        _figure(
            "parameter",
            place,
            html("{}<small>{}</small>", p["name"], " (log scale)" if p["kind"] == "log" else ""),
            parameter=index,
        )
        for index, p in enumerate(found[:_PARAMETERS])
    ]
    bar = "<span><i class='bar'></i>mean</span>" if any(p["kind"] == "category" for p in found) else ""
    more = f" {number(len(found) - _PARAMETERS)} further parameters are not drawn." if len(found) > _PARAMETERS else ""
    first = f" (the first of {len(digest.labels)} objectives)" if len(digest.labels) > 1 else ""
    return html(
        "<h3>Parameters against {}</h3><div class='key'><span>one mark per trial{}.{}</span>{}</div>"
        "<div class='grid'>{}</div>",
        digest.labels[0],
        first,
        more,
        Html(bar),
        join(figures),
    )


def _regimes(digest: Digest, place: int) -> Html:
    if len(digest.regimes) < 2 or not digest.ok:
        return Html("")
    parts = [html("<h3>Regimes</h3>")]
    if not digest.by_regime or digest.policy is not None:
        parts.append(
            html("<p class='muted'>What would be best under each regime alone, if the action could change with it:</p>")
        )
        parts.append(regime_table(digest, digest.best.by_regime))
    if len(digest.regimes) <= _REGIMES:
        caption = html("{} <small>by regime; the bar is the mean</small>", digest.labels[0])
        parts.append(_figure("regimes", place, caption, "large"))
    return join(parts)


# -- tables ---------------------------------------------------------------------------------------------------------


def _failures(digest: Digest) -> Html:
    failures = digest.failures()
    if not failures:
        return Html("")
    rows = [
        [html("<b>{}</b>", failure.outcome), failure.fault, number(failure.count), _reasons(digest, failure)]
        for failure in failures
    ]
    return html("<h3>Failures</h3>{}", table(["outcome", "fault", "trials", "reasons"], rows, "wide"))


def _reasons(digest: Digest, failure: Failure) -> Html:
    shown = [
        html(
            "<li>{} <span class='muted'>{}{}</span></li>",
            short(reason) or "no reason was recorded",
            f"{number(len(trials))} × · " if len(trials) > 1 else "",
            trial_links(digest.folder, trials),
        )
        for reason, trials in failure.reasons[:_REASONS]
    ]
    rest = len(failure.reasons) - _REASONS
    if rest > 0:
        shown.append(html("<li class='muted'>and {} more reasons</li>", number(rest)))
    return html("<ul>{}</ul>", join(shown))
