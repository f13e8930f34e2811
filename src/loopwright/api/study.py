"""A study: the results of one run on disk, and ask/tell for a loop of your own.

study = Study.read("out")
study.best.params, study.best.interval
study.trials().to_pandas()
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self, overload

from loopwright.api.ask_tell import AskTell, PendingTrial
from loopwright.core.errors import LedgerError, LoopwrightError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.reports.export import flat_row
from loopwright.reports.objective import Objective, evidence
from loopwright.reports.page import write_report
from loopwright.selection.recommendation import Candidate, recommend
from loopwright.selection.trials import stored_trials

_ROWS_SHOWN = 20
"""How many trials a notebook shows; a data frame has all."""


class NoResult(LoopwrightError, LookupError):
    """A study has no best configuration yet, because no trial succeeded."""


@dataclass(frozen=True)
class BestResult:
    """The best configuration of a study, with its evidence."""

    params: Mapping[str, Any]
    """What the agent chose; fixed arguments are not repeated here."""
    value: float
    """The objective in the unit of its metric, averaged over its measurements. Minimized metrics are not negated."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of `value`; None if the configuration was measured once."""
    metrics: Mapping[str, float]
    """Each metric, averaged over its measurements."""
    trials: tuple[int, ...]
    """The numbers of the trials that measured it."""
    confirmed: bool = False
    """Whether the numbers come from fresh measurements after the search, not from those that chose it."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Each objective by its name, as `value` is the first of them."""
    intervals: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    """The 95 % confidence interval of each objective."""

    @property
    def measurements(self) -> int:
        """How often it was measured."""
        return len(self.trials)

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"{self.evidence()} with {params}"

    def evidence(self) -> str:
        """Each objective with its interval and the number of measurements; named, if there are several."""
        parts = [f"{self.value:.6g} ({evidence(self.interval, self.measurements)})"]
        if len(self.values) > 1:
            parts = [
                f"{name} = {value:.6g} ({evidence(self.intervals[name], self.measurements)})"
                for name, value in self.values.items()
            ]
        return ", ".join(parts)


class Trials(Sequence[Trial]):
    """The trials of a study in order, also as a data frame."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = tuple(trials)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> "Trials": ...
    def __getitem__(self, index: int | slice) -> "Trial | Trials":
        return Trials(self._trials[index]) if isinstance(index, slice) else self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)

    def __repr__(self) -> str:
        return f"<{len(self)} trial{'s' if len(self) != 1 else ''}>"

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for trial in self for name in (*trial.action, *trial.metrics)))
        rows: list[list[Any]] = [["trial", *names, "outcome"]]
        for trial in self._trials[:_ROWS_SHOWN]:
            values = {**trial.action, **trial.metrics}
            cells = [f"{value:.6g}" if isinstance(value := values.get(name, ""), float) else value for name in names]
            rows.append([trial.number, *cells, trial.outcome or "running"])
        lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
        more = f"<br>{len(self) - _ROWS_SHOWN} more" if len(self) > _ROWS_SHOWN else ""
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{more}"

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per trial: number, outcome, reward, and a column per parameter and metric."""
        return [flat_row(trial) for trial in self._trials]

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with one row per trial."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas. Run: pip install pandas") from error
        return pd.DataFrame(self.rows())

    def to_polars(self) -> Any:
        """A polars.DataFrame with one row per trial."""
        try:
            import polars as pl
        except ImportError as error:
            raise ImportError("to_polars needs polars. Run: pip install polars") from error
        return pl.DataFrame(self.rows(), infer_schema_length=None)


@dataclass(frozen=True)
class Report:
    """A written report: one HTML file that opens from disk, and shows itself in a notebook."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text("utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0"></iframe>'


class Study:
    """One run in an output directory: its trials, its best configuration, its report.

    A study that `Study.open` returned also hands out trials:

        with Study.open("study.toml", "out") as study:
            while (trial := study.ask()) is not None:
                study.tell(trial, {"gflops": measure(**trial.params)})
    """

    def __init__(self, output: Path, run: str, code: int = 0, loop: AskTell | None = None) -> None:
        self.output, self.run, self.code = output, run, code
        """`code` is the exit code of the campaign: 0 if every run gave a result."""
        self._loop = loop

    @classmethod
    def read(cls, output: str | Path, run: str | None = None, *, code: int = 0) -> Self:
        """The study in an output directory, finished or not. `run` names one run of a scenario with several."""
        output = Path(output)
        names = [path.parent.name for path in sorted(output.glob("*/ledger.db"), key=lambda path: path.stat().st_ctime)]
        if not names:
            raise LedgerError(f"{output} contains no study. Pass the output directory of an earlier run.")
        if run is None and len(names) > 1:
            raise LedgerError(f"{output} contains several runs: {', '.join(names)}. Pass one of them as `run`.")
        if run is not None and run not in names:
            raise LedgerError(f"{output} contains no run {run!r}. Runs: {', '.join(names)}.")
        return cls(output, run or names[0], code)

    @classmethod
    def open(
        cls,
        scenario: str | Path | Mapping[str, Any],
        output: str | Path,
        *,
        run: str | None = None,
        set: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start or resume a study whose trials you measure yourself, for use in a `with` block."""
        loop = AskTell(scenario, Path(output), run, set or {})
        return cls(Path(output), loop.name, loop=loop)

    # -- ask and tell -------------------------------------------------------------------------------------------

    def ask(self) -> PendingTrial | None:
        """The next trial to measure, or None when the study is complete.

        Trials that the cache answers, or that a constraint forbids, are recorded without being handed out. Up to
        `system.parallel` trials may be pending at a time.
        """
        return self._driver.ask()

    def tell(self, trial: PendingTrial, metrics: Mapping[str, float]) -> None:
        """Record what you measured."""
        self._driver.tell(trial, metrics)

    def fail(self, trial: PendingTrial, reason: str) -> None:
        """Record that the trial failed; it gets no metrics and no reward, and is not proposed again."""
        self._driver.fail(trial, reason)

    def __enter__(self) -> Self:
        self._driver.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.code = self._driver.close()

    @property
    def _driver(self) -> AskTell:
        if self._loop is None:
            raise LedgerError("this study is read-only. Open it with loopwright.Study.open to ask for trials.")
        return self._loop

    # -- results ------------------------------------------------------------------------------------------------

    def trials(self) -> Trials:
        """All trials so far, in order."""
        with self._ledger() as ledger:
            return Trials(list(ledger.trials()))

    @property
    def best(self) -> BestResult:
        """The recommended configuration, or the best one so far if none was confirmed. Raises NoResult without any."""
        front = self.front
        if not front:
            ended = [trial for trial in self.trials() if trial.outcome not in (None, Outcome.OK)]
            first = "".join(f" {len(ended)} ended; trial {t.number} {t.outcome}: {t.reason}" for t in ended[:1])
            raise NoResult(f"{self.output / self.run}: no trial succeeded.{first}")
        return front[0]

    @property
    def front(self) -> list[BestResult]:
        """The configurations that no other one beats: one, or several if the study has several objectives."""
        trials = self.trials()
        by_number = {trial.number: trial for trial in trials}
        with self._ledger() as ledger:
            about = ledger.state("run", {})
            best = recommend(stored_trials(ledger), about)
        objectives = [Objective.of(label) for label in about.get("objectives") or ("reward",)]
        return [_result(each, [by_number[number] for number in each.trials], objectives) for each in best.front]

    def report(self) -> Report:
        """Write `report.html`, the same page that `loopwright report` makes."""
        return Report(write_report(self.output))

    def to_pandas(self) -> Any:
        """`trials()` as a pandas.DataFrame."""
        return self.trials().to_pandas()

    def to_polars(self) -> Any:
        """`trials()` as a polars.DataFrame."""
        return self.trials().to_polars()

    @property
    def _path(self) -> Path:
        return self.output / self.run / "ledger.db"

    def _ledger(self) -> Ledger:
        return Ledger.read(self._path)

    def _counts(self) -> str:
        if not self._path.exists():
            return "not started"
        with self._ledger() as ledger:
            counts = ledger.counts()
        done = sum(count for name, count in counts.items() if name not in ("running", "cached"))
        return f"{done} trial{'s' if done != 1 else ''}, {counts.get(Outcome.OK, 0)} ok"

    def __repr__(self) -> str:
        return f"<Study {self.run!r} in {self.output}: {self._counts()}>"

    def _repr_html_(self) -> str:
        lines = [f"<b>{html.escape(self.run)}</b> in <code>{html.escape(str(self.output))}</code>: {self._counts()}"]
        for best in self.front[:5] if self._path.exists() else ():
            params = ", ".join(f"{name} = {value!r}" for name, value in best.params.items())
            name = "recommended" if best.confirmed and best.interval else "best"
            lines.append(f"{name}: {html.escape(best.evidence())} with <code>{html.escape(params)}</code>")
        return "<br>".join(lines)


def _result(candidate: Candidate, trials: Sequence[Trial], objectives: Sequence[Objective]) -> BestResult:
    """A candidate in the user's own units."""
    first, rewards, intervals = objectives[0], candidate.objectives, candidate.intervals
    common = set.intersection(*(set(trial.metrics) for trial in trials))
    return BestResult(
        params=candidate.action,
        value=first.value(candidate.objectives[0]),
        interval=first.interval(intervals[0]),
        metrics={name: fmean(trial.metrics[name] for trial in trials) for name in trials[0].metrics if name in common},
        trials=candidate.trials,
        confirmed=candidate.confirmed,
        values={own.name: own.value(reward) for own, reward in zip(objectives, rewards, strict=True)},
        intervals={own.name: own.interval(bounds) for own, bounds in zip(objectives, intervals, strict=True)},
    )
