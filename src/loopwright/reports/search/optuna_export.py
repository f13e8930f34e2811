"""A search as an Optuna study in SQLite, for Optuna's own tools and as a warm start elsewhere."""

import warnings
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import storage
from loopwright.core.imports import lazy_module
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from loopwright.spaces.parameter import Fixed, Parameter, Range, parameters

if TYPE_CHECKING:
    import optuna
else:
    optuna = lazy_module("optuna")

_SCALARS = (int, float, str, bool, type(None))


def write_optuna(ledger: Ledger, path: Path) -> Path:
    """Write all finished trials as a study with the name of the run.

    A reward that is a metric or its negative is stored as that metric, with its own direction; any other as it is.
    """
    from sqlalchemy import event

    about = ledger.state("run", {})
    space, signs, names = parameters(about["parameters"]), *_objectives(ledger, about)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    part = path.with_name(f".{path.name}.part")
    with storage(path), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        part.unlink(missing_ok=True)
        target = optuna.storages.RDBStorage(f"sqlite:///{part.absolute()}")
        try:
            # The file is moved into place once it is complete, so that it need not survive a crash before.
            event.listen(target.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
            target.engine.dispose()
            study = optuna.create_study(
                study_name=about.get("name", path.parent.name),
                storage=target,
                directions=["minimize" if sign < 0 else "maximize" for sign in signs],
            )
            study.set_metric_names(names)
            for trial in ledger.trials():
                if not trial.unfinished:
                    study.add_trial(_frozen(trial, space, signs, _curve(ledger, trial, about)))
        finally:
            target.engine.dispose()
        part.replace(path)
    return path


def _objectives(ledger: Ledger, about: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    """The sign and the name of each objective: of its metric, if the reward is one or its negative."""
    tables = (ledger.state("source") or {}).get("run", {}).get("reward", [])
    tables = tables if isinstance(tables, list) else [tables]
    signs, names = [], []
    for label, table in zip(about.get("objectives") or (), tables, strict=False):
        is_negative = table.get("type") == "negative" and len(table.get("metrics", ())) == 1
        signs.append(-1 if is_negative else 1)
        names.append(table["metrics"][0] if is_negative else label)
    return signs or [1], names or ["reward"]


def _frozen(
    trial: Trial, space: Mapping[str, Parameter], signs: list[int], curve: Mapping[int, float]
) -> "optuna.trial.FrozenTrial":
    values = None
    if trial.reward is not None and trial.outcome is Outcome.OK:
        values = [sign * value for sign, value in zip(signs, trial.reward.objectives, strict=True)]
    state = optuna.trial.TrialState.FAIL if values is None else optuna.trial.TrialState.COMPLETE
    if trial.outcome is Outcome.STOPPED:
        state = optuna.trial.TrialState.PRUNED
    values_by_name = {name: value for name, value in trial.action.items() if name in space}
    try:
        distributions = {name: _distribution(space[name]) for name in values_by_name}
        params = {name: _plain(value) for name, value in values_by_name.items()}
        for name, distribution in distributions.items():
            distribution.to_internal_repr(params[name])
    except ValueError:
        distributions, params = {}, {}  # an invalid action is not a point of the space
    facts = {
        "trial": trial.number,
        "outcome": trial.outcome,
        "reason": trial.reason,
        "metrics": trial.metrics,
        "env_params": trial.regime,
        "noise": trial.noise,
        "phase": trial.phase,
        "cached_from": trial.cached_from,
    }
    frozen = optuna.trial.create_trial(
        state=state,
        values=values,
        params=params,
        distributions=distributions,
        user_attrs={name: dict(fact) if isinstance(fact, Mapping) else fact for name, fact in facts.items() if fact},
        intermediate_values=dict(curve),
    )
    frozen.datetime_start = datetime.fromtimestamp(trial.reserved_at)  # noqa: DTZ006  Optuna's are local
    if trial.finished_at is not None:
        frozen.datetime_complete = datetime.fromtimestamp(trial.finished_at)  # noqa: DTZ006
    return frozen


def _curve(ledger: Ledger, trial: Trial, about: Mapping[str, Any]) -> dict[int, float]:
    """The intermediate values of a trial, of the metric that stops trials."""
    stop = about.get("stop")
    if not stop or (data := ledger.payload(trial.number, "curve")) is None:
        return {}
    curve = orjson.loads(data)
    values = curve["metrics"].get(stop["metric"]) or ()
    return {step: value for step, value in zip(curve["steps"], values, strict=False) if value is not None}


def _distribution(parameter: Parameter) -> "optuna.distributions.BaseDistribution":
    match parameter:
        case Range(dtype="int"):
            return optuna.distributions.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
        case Range():
            return optuna.distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)
        case Fixed():
            return optuna.distributions.CategoricalDistribution([_plain(parameter.value)])
    return optuna.distributions.CategoricalDistribution([_plain(value) for value in parameter.grid()])


def _plain(value: Any) -> Any:
    """A candidate that Optuna can store: lists and tables become JSON."""
    return value if isinstance(value, _SCALARS) else orjson.dumps(value).decode()
