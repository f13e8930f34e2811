"""`trajectory.csv`: a row per trial, appended while the run goes and written in trial order once it has ended."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import orjson

from loopwright.core.errors import storage
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer

_FIRST = ("trial", "action", "reward", "observation", "env_params", "outcome", "noise", "phase")
_FATE = ("group", "fault", "reason")
_FIELDS = ("reserved_at", "finished_at")
_DURATIONS = ("wall_s", "user_s", "system_s")
_QUERY = (
    "SELECT number, action, reward, reward_detail, metrics, regime, outcome, noise, phase, grp, fault, reason, "
    "reserved_at, finished_at, usage FROM trials WHERE number > ? AND {where} ORDER BY number LIMIT 2000"
)
_METRICS = "SELECT DISTINCT each.key FROM trials, json_each(trials.metrics) AS each WHERE trials.metrics <> '{}'"


class Columns:
    """The columns of a run: those that every run has, then one per parameter and metric."""

    def __init__(self, about: Mapping[str, Any], metrics: Iterable[str]) -> None:
        draws = {*(about.get("env_params") or ()), *(about.get("noise") or ())}
        # The arguments of a live environment belong to its constructor; an action has no parts with their names.
        parameters = () if about.get("live") else about.get("parameters") or ()
        self._parameters = tuple(name for name in parameters if name not in draws)
        self._metrics = tuple(dict.fromkeys(metrics))
        flat = (*(f"action.{name}" for name in self._parameters), *(f"metric.{name}" for name in self._metrics))
        self._task = ("task",) if about.get("rollout") else ()
        self.names = (*_FIRST, *_FATE, *_FIELDS, *_DURATIONS, *self._task, *flat)

    def more(self, action: Mapping[str, Any], metrics: Mapping[str, Any], usage: Mapping[str, Any]) -> list[Any]:
        """Durations, parameters and metrics of a trial; empty where it has none."""
        values = [usage.get(name) for name in _DURATIONS]
        values += [action.get(name) for name in self._task]
        values += [
            _json(value) if isinstance(value := action.get(name), list | dict | bool) else value
            for name in self._parameters
        ]
        return values + [metrics.get(name) for name in self._metrics]


def write_trajectory(ledger: Ledger, file: TextIO, *, where: str = "1") -> None:
    """The trials of a ledger in order."""
    columns = Columns(ledger.state("run", {}), sorted(name for (name,) in ledger.transaction.rows(_METRICS)))
    rows, loads, query, after = csv.writer(file), orjson.loads, _QUERY.format(where=where), 0
    rows.writerow(columns.names)
    # As the ledger has it: there may be very many rows, and what is JSON there is JSON here.
    while page := ledger.transaction.rows(query, (after,)):
        rows.writerows(
            (
                number,
                action,
                _reward(value, loads(detail)["more"]) if detail is not None else "",
                "" if metrics == "{}" else metrics,
                *rest,
                *columns.more(loads(action), loads(metrics or "{}"), loads(usage or "{}")),
            )
            for number, action, value, detail, metrics, *rest, usage in page
        )
        after = page[-1][0]


class TrajectoryFile(Observer):
    """Appends each trial as it ends, in one write, so that nothing is missing after `kill -9`."""

    def __init__(self, ledger: Ledger, directory: Path) -> None:
        self._ledger, self._path = ledger, directory / "trajectory.csv"
        self._row = io.StringIO()
        self._rows = csv.writer(self._row)
        self._start()

    def _start(self) -> None:
        """Write the trials that have ended; those in flight follow when they end."""
        about = self._ledger.state("run", {})
        recorded = sorted(name for (name,) in self._ledger.transaction.rows(_METRICS))
        self._columns = Columns(about, recorded or about.get("metrics") or ())
        with storage(self._path), self._path.open("w", encoding="utf-8", newline="") as file:
            if recorded:
                write_trajectory(self._ledger, file, where="outcome <> 'aborted'")
            else:
                csv.writer(file).writerow(self._columns.names)
        self._file = self._path.open("ab", buffering=0)

    def after(self, trial: Trial) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self.close()  # `loopwright report` has put a new file in its place
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
                _json(trial.regime),
                trial.outcome,
                _json(trial.noise),
                trial.phase,
                trial.group,
                trial.fault,
                trial.reason,
                trial.reserved_at,
                trial.finished_at,
                *self._columns.more(trial.action, trial.metrics, trial.usage),
            )
        )
        self._file.write(self._row.getvalue().encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _reward(value: float, more: Iterable[float]) -> str:
    """A number, or a list of them for several objectives."""
    return _json([value, *more] if more else value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
