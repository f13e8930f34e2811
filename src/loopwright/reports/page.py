"""The report: one HTML file made from the ledgers alone, which opens from disk and needs no network."""

import logging
import os
import re
import shlex
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.ledger.check import check_ledger
from loopwright.ledger.ledger import Ledger
from loopwright.reports import formatting
from loopwright.reports.export import replacing, write_best, write_csv
from loopwright.reports.kinds import KINDS, read_run
from loopwright.reports.search.digest import Digest
from loopwright.selection.recommendation import Recommendation
from loopwright.selection.trials import StoredTrial

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)
_STATIC = Path(__file__).parent / "static"
_TRACES = ("ledger.db", "trials", "trajectory.csv", "best.toml")
"""Any of these shows that a folder belongs to a run, even if its ledger is gone."""
_FILTERS = ("assignments", "counted", "duration", "evenly", "exact", "measured", "number", "percent", "short", "size")


@dataclass(frozen=True)
class OverviewRow:
    """One run in the list of runs. `place` is None if it could not be shown."""

    name: str
    place: int | None = None
    status: tuple[str, str] | None = None
    headline: str = ""
    objective: str = ""
    succeeded: str = ""


@dataclass(frozen=True)
class ReadRuns:
    """The runs of an output directory, in the order in which they started."""

    digests: list[Digest]
    unreadable: list[tuple[str, str]]
    """The folders that could not be read, and why."""

    def best(self, folder: Path) -> Recommendation | None:
        """The answer of a search, if it was read."""
        return next((each.best for each in self.digests if each.folder == folder and each.kind == "search"), None)


def write_all(
    output: Path,
    *,
    check: bool = False,
    answers: dict[str, Recommendation] | None = None,
    histories: Mapping[str, list[StoredTrial]] | None = None,
) -> int:
    """Write everything that is made from the ledgers: CSV files, best.toml, report.html. Returns 1 on a failure.

    Nothing is raised, since that would hide the error of a run. With `check`, a damaged ledger is a failure, and its
    run is shown as damaged. A run that this process continued was checked when its ledger was opened. `answers` gets
    the recommendation of each search. `histories` holds the first trials of runs that were read before.
    """
    paths = sorted(output.glob("*/ledger.db"))
    damage: dict[str, str] = {}
    for path in paths if check else ():
        try:
            damage |= {path.parent.name: problem} if (problem := check_ledger(path).message) else {}
        except LoopwrightError as error:
            damage[path.parent.name] = str(error)
    failures = list[str](damage.values())

    @contextmanager
    def collecting() -> Iterator[None]:
        try:
            yield
        except (LoopwrightError, OSError) as error:
            failures.append(str(error))
        except Exception as error:
            log.exception("unexpected error in a report; the ledgers are complete, and `loopwright report` tries again")
            failures.append(f"the report could not be made: {type(error).__name__}: {error}")

    with collecting():
        runs = read_runs(output, damage, histories)
        for path in paths:
            with collecting(), Ledger.read(path) as ledger:
                write_csv(ledger, path.parent)
                best = runs.best(path.parent)
                write_best(ledger, path.parent / "best.toml", best)
                if answers is not None and best is not None:
                    answers[path.parent.name] = best
        with collecting():
            write_report(output, runs)
    for failure in dict.fromkeys(failures):
        log.error("%s", failure)
    return 1 if failures else 0


def write_report(output: Path, runs: ReadRuns | None = None) -> Path:
    """Write `<output>/report.html` from every `<output>/<run>/ledger.db`. Unreadable runs are named in it."""
    runs = runs or read_runs(output)
    digests = runs.digests
    scenarios = [digest.provenance for digest in digests]
    names = (each.get("name") or Path(str(each.get("scenario") or "")).stem for each in scenarios)
    charts: list[dict[str, Any]] = []
    sections, overview = [], []
    for digest in digests:
        section, row = _run_section(output, digest, charts)
        sections.append(section)
        overview.append(row)
    return write_page(
        output / "report.html",
        title=" · ".join(dict.fromkeys(str(name) for name in names if name)) or output.absolute().name,
        subtitle=formatting.counted(len(digests), "run") if digests else "no run was found here",
        unreadable=runs.unreadable,
        overview=overview,
        sections=sections,
        charts=charts,
    )


def write_page(
    target: Path,
    *,
    title: str,
    subtitle: str,
    sections: Sequence[str],
    charts: Sequence[Mapping[str, Any]],
    unreadable: Sequence[tuple[str, str]] = (),
    overview: Sequence[OverviewRow] = (),
) -> Path:
    """Write a page of sections, each as markup, with the charts that report.js draws in them."""
    library = (_STATIC / "echarts.common.min.js").read_text("utf-8")
    script = (_STATIC / "report.js").read_text("utf-8")
    data = orjson.dumps(charts, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY, default=str).decode()
    page = render(
        "page.html",
        title=title,
        style=(_STATIC / "report.css").read_text("utf-8"),
        # Only these two scripts may run, whatever else gets into the page.
        hashes=" ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (library, script)),
        written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs_found=subtitle,
        unreadable=unreadable,
        overview=overview,
        sections=sections,
        # JSON that cannot end the script element it stands in.
        data=data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        library=library,
        script=script,
    )
    with replacing(target) as file:
        # Names on disk may hold bytes that are not text.
        file.write(page.encode("utf-8", "replace").decode())
    return target


def render(template: str, **values: Any) -> str:
    """A template as markup, with every value escaped."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values))  # noqa: S704  rendered with autoescape


def read_runs(
    output: Path,
    damage: Mapping[str, str] | None = None,
    histories: Mapping[str, list[StoredTrial]] | None = None,
) -> ReadRuns:
    """Read every run. `damage` holds what is wrong with the ledger of a run, by its folder; its section shows that."""
    damage, histories = damage or {}, histories or {}
    digests, unreadable = [], []
    folders = (path for path in output.iterdir() if any((path / trace).exists() for trace in _TRACES))
    for folder in sorted(folders):
        try:
            digest = read_run(folder, histories.get(folder.name))
            digests.append(replace(digest, trouble=damage[folder.name]) if folder.name in damage else digest)
        except (LoopwrightError, OSError, ValueError) as error:
            unreadable.append((folder.name, str(error)))
    return ReadRuns(sorted(digests, key=lambda digest: (digest.started_at, digest.name)), unreadable)


def _run_section(output: Path, digest: Digest, charts: list[dict[str, Any]]) -> tuple[str, OverviewRow]:
    """A run's section as markup, and its row in the list of runs. Its chart data is appended to `charts`."""
    from markupsafe import Markup

    kind, place = KINDS[digest.kind], len(charts)
    try:
        chart = kind.chart(digest)
        section = render(
            f"{digest.kind}.html",
            digest=digest,
            place=place,
            chart=chart,
            output=shlex.quote(str(output)),
            agent=digest.table("agent"),
            workload=digest.table("workload"),
            provenance=provenance(digest),
            **kind.view(digest, chart),
        )
        row = OverviewRow(
            name=digest.name,
            place=place,
            status=digest.status,
            headline=kind.headline(digest),
            objective=", ".join(digest.labels),
            succeeded=f"{formatting.number(digest.succeeded)} of {formatting.number(digest.count)}",
        )
    except Exception as error:  # noqa: BLE001  a ledger that makes no sense must not hide the other runs
        note = "<p class='note bad'><b>{}</b> could not be shown: its ledger makes no sense here ({}: {}).</p>"
        text = Markup(note).format(digest.name, type(error).__name__, error)  # noqa: S704  it escapes its values
        return text, OverviewRow(digest.name)
    charts.append(chart)
    return section, row


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {name: getattr(formatting, name) for name in _FILTERS}
    environment.filters |= {"only": only, "code": code}
    environment.globals |= {"trial_logs": trial_logs, "unit_of": formatting.unit_of}
    return environment


def code(text: str) -> str:
    """Text as markup, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  escaped


def only(action: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named values of an action; all of them if none is named."""
    return {name: value for name, value in action.items() if name in names} or dict(action)


def trial_logs(folder: Path, number: int) -> list[tuple[str, str]]:
    """The logs of a trial that exist, each with a link relative to the report."""
    return [
        # "./" keeps a folder called `javascript:` a folder.
        (log, "./" + quote(os.fsencode(f"{folder.name}/trials/{number}/{log}")))
        for log in ("stdout", "stderr")
        if (folder / "trials" / str(number) / log).is_file()
    ]


def provenance(digest: Digest) -> list[tuple[str, list[str]]]:
    """Everything needed to get the same numbers again: a name and its values, one per line."""
    recorded, about, rollout = digest.provenance, digest.about, digest.table("rollout")
    memory = recorded.get("memory_bytes")
    facts: dict[str, Any] = {
        "scenario": recorded.get("scenario"),
        "started": _moment(recorded.get("started_at")),
        **{name: recorded.get(name) for name in ("loopwright", "git", "python", "host", "platform")},
        "processors": recorded.get("cpus"),
        "memory": formatting.size(memory) if isinstance(memory, (int, float)) else None,
        "agent": digest.table("agent") or None,
        "parameters": digest.table("parameters") or None,
        "drawn by the environment": digest.table("env_params") or None,
        "constraints": about.get("constraints") or None,
        "workload": digest.table("workload") or None,
        **{name: rollout.get(name) for name in ("tasks", "loop", "judger", "produce", "engine")},
        "settings of single sources": rollout.get("sources") or None,
        "fingerprint": about.get("fingerprint"),
        "ledger": f"{digest.name}/ledger.db",
    }
    return [(name, _lines(value)) for name, value in facts.items() if value is not None]


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name} = {formatting.short(part, 1000)}" for name, part in value.items()]
    if isinstance(value, list):
        return [formatting.short(part, 1000) for part in value]
    return [formatting.short(value, 2000)]


def _moment(seconds: Any) -> str | None:
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return None
