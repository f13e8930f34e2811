"""`trajectory.csv`: a row per trial, appended while the run goes and in trial order once it has ended.

A run that has appended all its trials in order records that, so that nobody writes a large file again as it is.
"""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import orjson

from loopwright.core.errors import LoopwrightError, storage
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer
from loopwright.selection.trials import ONE_OBJECTIVE

_FIRST = ("trial", "action", "reward", "observation", "env_params", "outcome", "noise", "phase")
_FATE = ("group", "fault", "reason")
_FIELDS = ("reserved_at", "finished_at")
_DURATIONS = ("wall_s", "user_s", "system_s")
_AS_JSON = (float, bool, list, dict)
"""The types of cells that are JSON; floats because `csv` takes ten times as long."""
_QUERY = (
    "SELECT number, action, reward, reward_detail, metrics, regime, outcome, noise, phase, grp, fault, reason, "
    "reserved_at, finished_at, usage FROM trials WHERE number > ? AND {where} ORDER BY number LIMIT 2000"
)
_LAST = "SELECT ifnull(max(number), 0) FROM trials"
_FIRST_TRIALS = 100
_METRICS = "SELECT DISTINCT each.key FROM trials, json_each(trials.metrics) AS each WHERE trials.metrics <> '{}'"


class Columns:
    """The columns of a run: those that every run has, then one per parameter and metric."""

    def __init__(self, about: Mapping[str, Any], metrics: Iterable[str]) -> None:
        draws = {*(about.get("env_params") or ()), *(about.get("noise") or ())}
        # The arguments of a live environment belong to its constructor; an action has no parts with their names.
        parameters = () if about.get("live") else about.get("parameters") or ()
        self._parameters = tuple(name for name in parameters if name not in draws)
        self.metrics = tuple(dict.fromkeys(metrics))
        flat = (*(f"action.{name}" for name in self._parameters), *(f"metric.{name}" for name in self.metrics))
        self._task = ("task",) if about.get("rollout") else ()
        self.names = (*_FIRST, *_FATE, *_FIELDS, *_DURATIONS, *self._task, *flat)

    def more(self, action: Mapping[str, Any], metrics: Mapping[str, Any], usage: Mapping[str, Any]) -> list[Any]:
        """Durations, parameters and metrics of a trial; empty where it has none."""
        values = [*map(usage.get, _DURATIONS)]
        # The action of a live environment is whatever its space has: only those of rollouts and searches have parts.
        values += [action.get(name) for name in (*self._task, *self._parameters)]
        values += map(metrics.get, self.metrics)
        return [_json(value) if isinstance(value, _AS_JSON) else value for value in values]


def write_trajectory(ledger: Ledger, file: TextIO, *, where: str = "1", columns: Columns | None = None) -> None:
    """The trials of a ledger in order."""
    columns = columns or Columns(ledger.state("run", {}), _metric_names(ledger))
    rows, loads, query, after = csv.writer(file), orjson.loads, _QUERY.format(where=where), 0
    rows.writerow(columns.names)
    # As the ledger has it: there may be very many rows, and what is JSON there is JSON here.
    while page := ledger.transaction.rows(query, (after,)):
        rows.writerows(
            (
                number,
                action,
                ""
                if detail is None
                else _reward(value, () if detail.endswith(ONE_OBJECTIVE) else loads(detail)["more"]),
                "" if metrics == "{}" else metrics,
                *rest,
                *columns.more(loads(action), loads(metrics or "{}"), loads(usage or "{}")),
            )
            for number, action, value, detail, metrics, *rest, usage in page
        )
        after = page[-1][0]


def complete_columns(ledger: Ledger, path: Path) -> Columns | None:
    """The columns of a file that is as its run left it, with every trial in order; None if it may lack something."""
    recorded = ledger.state("trajectory")
    if not recorded or not path.exists() or recorded["file"] != _identity(path.stat()):
        return None
    ((reserved, ended),) = ledger.transaction.rows("SELECT max(reserve_seq), max(result_seq) FROM trials")
    columns = Columns(ledger.state("run", {}), recorded["metrics"])
    is_current = max(reserved or 0, ended or 0) <= recorded["event"] and list(columns.names) == recorded["columns"]
    return columns if is_current else None


def _identity(file: os.stat_result) -> list[int]:
    return [file.st_size, file.st_mtime_ns]


def _metric_names(ledger: Ledger) -> list[str]:
    return sorted(name for (name,) in ledger.transaction.rows(_METRICS))


class TrajectoryFile(Observer):
    """Appends each trial as it ends, in one write, so that nothing is missing after `kill -9`."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._ledger, self._path = ledger, directory / "trajectory.csv"
        self._row = io.StringIO()
        self._rows = csv.writer(self._row)
        self._start()

    def _start(self) -> None:
        """Write the trials that have ended; those in flight follow when they end."""
        ledger, about = self._ledger, self._ledger.state("run", {})
        ((self._last,),) = ledger.transaction.rows(_LAST)
        left = ledger.transaction.rows("SELECT 1 FROM trials WHERE ifnull(outcome, 'aborted') = 'aborted' LIMIT 1")
        self._in_order = not left
        columns = None if left or not self._last else complete_columns(ledger, self._path)
        if columns is not None:
            self._columns, self._metrics = columns, set(columns.metrics)
        else:
            recorded = _metric_names(ledger) if self._last else []
            self._metrics = set(recorded)
            self._columns = Columns(about, recorded or sorted(about.get("metrics") or ()))
            with storage(self._path), self._path.open("w", encoding="utf-8", newline="") as file:
                write_trajectory(ledger, file, where="outcome <> 'aborted'", columns=self._columns)
        self._file = self._path.open("ab", buffering=0)

    def after(self, trial: Trial) -> None:
        is_replaced = not os.fstat(self._file.fileno()).st_nlink  # by `loopwright report`
        # Metrics that no scenario declares are known from the first trials; later ones get their column at the end.
        if is_replaced or (trial.number <= _FIRST_TRIALS and not trial.metrics.keys() <= set(self._columns.metrics)):
            self._file.close()
            self._start()
            return
        reward = trial.reward
        self._row.seek(0)
        self._row.truncate()
        self._rows.writerow(
            (
                trial.number,
                _json(trial.action),
                "" if reward is None else _reward(reward.value, reward.more),
                _json(trial.metrics) if trial.metrics else "",
                _json(trial.regime) if trial.regime else "{}",
                trial.outcome,
                _json(trial.noise) if trial.noise else "{}",
                trial.phase,
                trial.group,
                trial.fault,
                trial.reason,
                _json(trial.reserved_at),
                _json(trial.finished_at),
                *self._columns.more(trial.action, trial.metrics, trial.usage),
            )
        )
        self._file.write(self._row.getvalue().encode("utf-8", "replace"))
        self._metrics.update(trial.metrics)
        self._in_order = self._in_order and trial.number == self._last + 1
        self._last = trial.number

    def close(self) -> None:
        """Close the file, and record that it is complete if it is."""
        file, ledger, metrics = os.fstat(self._file.fileno()), self._ledger, sorted(self._metrics)
        self._file.close()
        is_whole = self._in_order and file.st_nlink and list(self._columns.metrics) == metrics
        with suppress(LoopwrightError):  # without the record, it is written again
            if is_whole and ledger.transaction.rows(_LAST) == [(self._last,)]:
                names, event = self._columns.names, ledger.chain.last[0]
                record = {"file": _identity(file), "metrics": metrics, "columns": names, "event": event}
                ledger.set_state("trajectory", record)


def _reward(value: float, more: Iterable[float]) -> str:
    """A number, or a list of them for several objectives."""
    return _json([value, *more] if more else value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
