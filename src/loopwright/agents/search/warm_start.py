"""Warm start: the trials of an earlier run, or of an Optuna study, that fit this one."""

import logging
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from loopwright.core.errors import InvalidAction, LedgerError, did_you_mean
from loopwright.core.imports import lazy_module
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Regime
from loopwright.envs.search import SearchEnv
from loopwright.ledger.ledger import Ledger
from loopwright.spaces.parameter import Choice

if TYPE_CHECKING:
    import optuna
else:
    optuna = lazy_module("optuna")

log = logging.getLogger(__name__)
_STUDY = "sqlite:///"
WarmTrial = tuple[Action, Regime, tuple[float, ...]]
"""An action that is valid here, its regime, and its objectives under this run's reward functions."""


def warm_start_problem(source: str, home: Path) -> str | None:
    """Why there is nothing to learn from at this place, and the fix; None if there is."""
    if source.startswith(_STUDY):
        try:
            _Study.find(source, home)
        except LedgerError as error:
            return str(error)
    elif not (home / source / "ledger.db").is_file():
        return f"{home / source} has no ledger.db."
    return None


def warm_trials(env: SearchEnv, source: str) -> Iterator[WarmTrial]:
    """The trials of the folder of a run, or of `sqlite:///file#study`, that fit this run."""
    home = env.workload.site.scenario_dir
    is_study = source.startswith(_STUDY)
    count = 0
    for trial in _study_trials(env, _Study.find(source, home)) if is_study else _ledger_trials(env, home / source):
        count += 1
        yield trial
    if not count:
        log.warning("warm_start = %r: no trial there fits this space and reward, so none is learned from", source)


def _ledger_trials(env: SearchEnv, folder: Path) -> Iterator[WarmTrial]:
    with Ledger.read(folder / "ledger.db") as ledger:
        # The other run may have continued since: after a resume this one must learn from the same trials as before.
        until = env.book.ledger.state("warm_until")
        if until is None:
            until = ledger.last()[0]
            env.book.ledger.set_state("warm_until", until)
        for trial in ledger.trials():
            if trial.number > until:
                break
            if trial.outcome is not Outcome.OK or trial.cached_from is not None:
                continue
            if (warm := _warm(env, trial.action, trial.regime, trial.metrics)) is not None:
                yield warm


def _warm(env: SearchEnv, action: Action, regime: Regime, metrics: Mapping[str, float]) -> WarmTrial | None:
    try:
        action = env.space.validate(action)
        reward = env.objectives.score(metrics)
    except (InvalidAction, ArithmeticError, ValueError, KeyError, TypeError):
        return None
    return None if reward is None else (action, regime, reward.objectives)


# -- Optuna studies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Study:
    """A study in a SQLite file."""

    file: Path
    name: str

    @classmethod
    def find(cls, source: str, home: Path) -> "_Study":
        """The study that `sqlite:///file#name` names; the name may be left out if there is only one."""
        place, _, name = source.removeprefix(_STUDY).partition("#")
        file = home / place
        if not file.is_file():
            raise LedgerError(f"{file} does not exist. Write sqlite:///FILE#STUDY, FILE relative to the scenario.")
        try:
            with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as connection:
                names = [row[0] for row in connection.execute("SELECT study_name FROM studies ORDER BY study_id")]
        except sqlite3.Error as error:
            raise LedgerError(f"{file} is not a storage of Optuna: {error}.") from error
        if not name and len(names) == 1:
            return cls(file, names[0])
        if name not in names:
            hint = did_you_mean(name, names) if name and names else f"Its studies: {', '.join(names) or 'none'}."
            raise LedgerError(f"{file} has no study {name!r}. {hint}")
        return cls(file, name)

    def read(self) -> "tuple[list[str], list[optuna.trial.FrozenTrial]]":
        """The directions and the complete trials. Reads only; the owner of the study may be writing."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.RDBStorage(f"sqlite:///file:{quote(str(self.file.absolute()))}?mode=ro&uri=true")
        try:
            study = optuna.load_study(study_name=self.name, storage=storage)
            trials = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
            return [direction.name for direction in study.directions], trials
        finally:
            storage.engine.dispose()


def _study_trials(env: SearchEnv, source: _Study) -> Iterator[WarmTrial]:
    directions, complete = source.read()
    functions = env.objectives.functions
    if len(directions) != len(functions):
        raise LedgerError(
            f"study {source.name!r} has {len(directions)} objectives, this run has {len(functions)}; they cannot "
            "be compared. Remove warm_start, or give the run the rewards of the study."
        )
    # As above: after a resume, the same trials.
    numbers = env.book.ledger.state("warm_numbers")
    if numbers is None:
        numbers = [trial.number for trial in complete]
        env.book.ledger.set_state("warm_numbers", numbers)
    accepted = set(numbers)
    fitting: list[tuple[WarmTrial, list[float]]] = []
    for trial in complete:
        if trial.number not in accepted or trial.user_attrs.get("cached_from"):
            continue
        metrics, regime = _metrics(env, trial), trial.user_attrs.get("env_params") or {}
        if metrics is not None and (warm := _warm(env, _action(env, trial.params), regime, metrics)) is not None:
            fitting.append((warm, trial.values))
    for place, direction in enumerate(directions):
        _check_direction(source.name, direction, [(warm[2][place], values[place]) for warm, values in fitting])
    for warm, _ in fitting:
        yield warm


def _metrics(env: SearchEnv, trial: "optuna.trial.FrozenTrial") -> dict[str, float] | None:
    """The metrics of a trial: as recorded by `loopwright export`, or each value as the one metric of its reward."""
    if isinstance(recorded := trial.user_attrs.get("metrics"), dict):
        return recorded
    needs = [sorted(function.needs()) for function in env.objectives.functions]
    if any(len(names) != 1 for names in needs):
        return None
    return {names[0]: value for names, value in zip(needs, trial.values, strict=True)}


def _action(env: SearchEnv, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as values of this space: candidates that Optuna cannot store are there as JSON."""
    action = dict(params)
    for name, value in params.items():
        parameter = env.space.tunable.get(name)
        if isinstance(parameter, Choice) and isinstance(value, str) and value not in parameter.values:
            texts = {orjson.dumps(candidate).decode(): candidate for candidate in parameter.values}
            action[name] = texts.get(value, value)
    return action


def _check_direction(study: str, direction: str, pairs: list[tuple[float, float]]) -> None:
    """Raise if the best of the study is worse than its worst under this run's reward."""
    if len(pairs) < 2:
        return
    sign = -1 if direction == "MINIMIZE" else 1
    worst, best = min(pairs, key=lambda pair: sign * pair[1]), max(pairs, key=lambda pair: sign * pair[1])
    if best[0] < worst[0]:
        verb, fix = ("minimizes", "negative") if sign < 0 else ("maximizes", "identity")
        raise LedgerError(
            f"warm_start: study {study!r} {verb} its value, and the reward of this run prefers the opposite. Use a "
            f'reward such as {{ type = "{fix}", metrics = […] }}.'
        )
