"""What stands behind a run: the time and memory it took, and where it came from."""

from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from loopwright.core.trial import Trial
from loopwright.reports.links import trial_links
from loopwright.reports.markup import Html, assignments, duration, html, join, short, size, table
from loopwright.reports.search.digest import Digest


def resources(digest: Digest) -> Html:
    """How long the trials took, and the slowest of them."""
    used = [(trial, wall) for trial in digest.trials if (wall := _usage(trial, "wall_s")) is not None]
    if len(used) < 2:
        return Html("")
    slowest = sorted(used, key=lambda pair: -pair[1])[:3]
    cpu_s = sum((_usage(trial, "user_s") or 0.0) + (_usage(trial, "system_s") or 0.0) for trial, _ in used)
    text = (
        f"The median trial took {duration(median(wall for _, wall in used))}, the slowest {duration(slowest[0][1])}; "
        f"together they used {duration(cpu_s)} of processor time."
    )
    rows = [
        [
            trial_links(digest.folder, [trial.number]),
            trial.outcome or "running",
            _spent(trial, "wall_s"),
            _spent(trial, "user_s"),
            _spent(trial, "system_s"),
            _spent(trial, "max_rss_bytes"),
            html("<div class='mono text'>{}</div>", short(assignments(trial.action), 160)),
        ]
        for trial, _ in slowest
    ]
    head = ["slowest", "outcome", "wall", "user", "system", "peak memory", "action"]
    return html("<h3>Time and memory</h3><p class='muted'>{}</p>{}", text, table(head, rows, "wide"))


def _usage(trial: Trial, name: str) -> float | None:
    value = trial.usage.get(name)
    return float(value) if isinstance(value, (int, float)) and trial.cached_from is None else None


def _spent(trial: Trial, name: str) -> Html:
    value = _usage(trial, name)
    text = "–" if value is None else size(value) if name.endswith("_bytes") else duration(value)
    return html("<span class='number'>{}</span>", text)


def provenance(digest: Digest) -> Html:
    """Everything that is needed to get the same numbers again."""
    known, about = digest.provenance, digest.about
    facts: dict[str, Any] = {
        "scenario": known.get("scenario"),
        "started": _moment(known.get("started_at")),
        "loopwright": known.get("loopwright"),
        "git": known.get("git"),
        "python": known.get("python"),
        "host": known.get("host"),
        "platform": known.get("platform"),
        "processors": known.get("cpus"),
        "memory": size(known["memory_bytes"]) if isinstance(known.get("memory_bytes"), (int, float)) else None,
        "agent": part(about, "agent") or None,
        "parameters": part(about, "parameters") or None,
        "drawn by the environment": part(about, "env_params") or None,
        "constraints": about.get("constraints") or None,
        "workload": part(about, "workload") or None,
        **{name: part(about, "rollout").get(name) for name in ("tasks", "loop", "judger", "produce", "engine")},
        "fingerprint": about.get("fingerprint"),
        "ledger": f"{digest.name}/ledger.db",
    }
    rows = [
        [name, html("<span class='mono'>{}</span>", _written(value))]
        for name, value in facts.items()
        if value is not None
    ]
    return html("<details><summary>Provenance</summary>{}</details>", table(["", ""], rows, "wide facts"))


def _written(value: Any) -> Html:
    if isinstance(value, dict):
        return join((html("{} = {}", name, short(part, 1000)) for name, part in value.items()), "<br>")
    if isinstance(value, list):
        return join((html("{}", short(part, 1000)) for part in value), "<br>")
    return html("{}", short(value, 2000))


def _moment(seconds: Any) -> str | None:
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return None


def part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table within a table; empty where there is none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}
