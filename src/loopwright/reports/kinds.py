"""How each kind of run is reported: its digest, headline, charts and page values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.reports.live import page as live
from loopwright.reports.live.digest import read_live
from loopwright.reports.rollout import page as rollout
from loopwright.reports.rollout.digest import read_rollouts
from loopwright.reports.search import page as search
from loopwright.reports.search.charts import chart_data
from loopwright.reports.search.digest import Digest, basics, read_search
from loopwright.reports.search.headline import headline
from loopwright.reports.training import page as training
from loopwright.reports.training.digest import headline as training_headline
from loopwright.reports.training.digest import read_training
from loopwright.selection.trials import StoredTrial


@dataclass(frozen=True)
class ReportKind:
    """The report of one kind of run. The page is rendered from `templates/<kind>.html`."""

    read: Callable[[Ledger], Digest]
    headline: Callable[[Any], str]
    chart: Callable[[Any], dict[str, Any]]
    view: Callable[[Any, dict[str, Any]], Mapping[str, Any]]
    """The values that the template needs besides the digest and the chart."""


KINDS = {
    "search": ReportKind(read_search, headline, chart_data, search.view),
    "live": ReportKind(read_live, live.headline, live.chart_data, live.view),
    "rollout": ReportKind(read_rollouts, rollout.headline, rollout.chart_data, rollout.view),
    "training": ReportKind(read_training, training_headline, training.chart_data, training.view),
}


def read_run(folder: Path, history: list[StoredTrial] | None = None) -> Digest:
    """The digest of `<folder>/ledger.db`; raises LedgerError if there is nothing to read.

    `history` holds the first trials of a search, if they were read before.
    """
    with Ledger.read(folder / "ledger.db") as ledger:
        kind = kind_of(basics(ledger)["about"])
        return read_search(ledger, history) if kind == "search" else KINDS[kind].read(ledger)


def kind_of(about: Mapping[str, Any]) -> str:
    """The kind of a run, from its description in the ledger."""
    if "kind" in about:
        return str(about["kind"])
    if about.get("rollout"):
        agent = about.get("agent")
        return "training" if isinstance(agent, dict) and isinstance(agent.get("steps"), int) else "rollout"
    return "live" if about.get("live") is True else "search"
