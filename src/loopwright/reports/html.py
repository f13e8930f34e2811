"""The report: one HTML file from the ledgers alone, which opens from disk and needs no network."""

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.reports.export import replacing
from loopwright.reports.live.digest import LiveDigest, read_run
from loopwright.reports.live.page import live_chart, live_headline
from loopwright.reports.markup import Html, html, join, number, table
from loopwright.reports.rollout.digest import RolloutDigest
from loopwright.reports.rollout.page import rollout_chart, rollout_headline
from loopwright.reports.search.charts import chart_data
from loopwright.reports.search.digest import Digest
from loopwright.reports.search.headline import headline
from loopwright.reports.sections import live_section, rollout_section, run_section, status, training_section
from loopwright.reports.training.digest import TrainingDigest
from loopwright.reports.training.digest import headline as training_headline
from loopwright.reports.training.page import training_chart

_STATIC = Path(__file__).parent / "static"
_TRACES = ("ledger.db", "trials", "trajectory.csv", "best.toml")
"""What shows that a folder belongs to a run, also when its ledger is gone."""


def write_report(output: Path) -> Path:
    """Write `<output>/report.html` from every `<output>/<run>/ledger.db`; what cannot be read is said in it."""
    digests, notes = _read_all(output)
    page = _page(output, digests, notes)
    target = output / "report.html"
    with replacing(target) as file:
        # Names on disk may hold bytes that are no text.
        file.write(page.encode("utf-8", "replace").decode())
    return target


def _read_all(output: Path) -> tuple[list[Digest], list[Html]]:
    digests, notes = [], []
    folders = (path for path in output.iterdir() if any((path / trace).exists() for trace in _TRACES))
    for folder in sorted(folders):
        try:
            digests.append(read_run(folder))
        except (LoopwrightError, OSError, ValueError) as error:
            notes.append(html("<p class='note bad'><b>{}</b> could not be read: {}</p>", folder.name, error))
    return sorted(digests, key=lambda digest: (digest.started_at, digest.name)), notes


def _page(output: Path, digests: list[Digest], notes: list[Html]) -> str:
    charts: list[dict[str, Any]] = []
    shown = [_shown(output, digest, charts) for digest in digests]
    library = (_STATIC / "echarts.common.min.js").read_text("utf-8")
    script = (_STATIC / "report.js").read_text("utf-8")
    title = " · ".join(_scenarios(digests) or [output.absolute().name])
    return Template((_STATIC / "page.html").read_text("utf-8")).substitute(
        title=html("{}: Loopwright report", title),
        style=(_STATIC / "report.css").read_text("utf-8"),
        # Only these two scripts may run, whatever else should get into the page.
        hashes=" ".join(f"'sha256-{_hash(text)}'" for text in (library, script)),
        body=join([_header(title, digests), *notes, _overview(shown), *(section for section, _ in shown)], "\n"),
        data=_embedded(charts),
        library=library,
        script=script,
    )


def _shown(output: Path, digest: Digest, charts: list[dict[str, Any]]) -> tuple[Html, Sequence[object]]:
    """A run's part of the page, and its row in the list of runs."""
    try:
        if isinstance(digest, TrainingDigest):
            chart, told = training_chart(digest), training_headline(digest)
            section = training_section(digest, len(charts), chart, output)
        elif isinstance(digest, RolloutDigest):
            chart, told = rollout_chart(digest), rollout_headline(digest)
            section = rollout_section(digest, len(charts), chart, output)
        elif isinstance(digest, LiveDigest):
            chart, told = live_chart(digest), live_headline(digest)
            section = live_section(digest, len(charts), chart, output)
        else:
            chart, told = chart_data(digest), headline(digest)
            section = run_section(digest, len(charts), chart, output)
        link = html("<a href='#run-{}'>{}</a>", len(charts) + 1, digest.name)
        done = f"{number(digest.succeeded)} of {number(digest.count)}"
        row = [link, status(digest), told, ", ".join(digest.labels), done]
    except Exception as error:  # noqa: BLE001  a ledger that makes no sense must not hide the other runs
        text = "<p class='note bad'><b>{}</b> could not be shown: its ledger makes no sense here ({}: {}).</p>"
        return html(text, digest.name, type(error).__name__, error), [digest.name, "could not be shown", "", "", ""]
    charts.append(chart)
    return section, row


def _header(title: str, digests: list[Digest]) -> Html:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    runs = "no run was found here" if not digests else "1 run" if len(digests) == 1 else f"{number(len(digests))} runs"
    return html("<header><h1>{}</h1><small>Loopwright report of {} · {}</small></header>", title, now, runs)


def _overview(shown: list[tuple[Html, Sequence[object]]]) -> Html:
    """The answers of all runs side by side."""
    if len(shown) < 2:
        return Html("")
    head = ["run", "status", "best", "objective", "ok trials"]
    return html("<h3>Runs</h3>{}", table(head, (row for _, row in shown), "wide"))


def _scenarios(digests: list[Digest]) -> list[str]:
    known = [digest.provenance for digest in digests]
    names = (about.get("name") or Path(str(about.get("scenario") or "")).stem for about in known)
    return list(dict.fromkeys(str(name) for name in names if name))


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY, default=str).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()
