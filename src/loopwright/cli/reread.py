"""`loopwright reread`: read metrics again from the output that trials left, for example with a corrected pattern."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from loopwright.cli.options import OutputArgument, RunOption, emit, show
from loopwright.cli.overrides import Overrides, overrides_of
from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Objectives, Result, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import number, pairs
from loopwright.reports.page import write_all
from loopwright.scenario.dispatch import hold, reopen
from loopwright.scenario.load import load
from loopwright.workloads.command import PatternTimeout, read_metrics
from loopwright.workloads.command_config import CommandConfig


def command(
    output: OutputArgument,
    *,
    run: RunOption = None,
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", "-s", metavar="FILE", help="The corrected scenario; by default the one of the run."),
    ] = None,
    overrides: Overrides = None,
    write: Annotated[
        bool, typer.Option("--write", help="Store them as the results of the trials, and rebuild the reports.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per trial, then the summary.")] = False,
) -> None:
    """Read the metrics of finished trials again. Nothing is run.

    With --write, reports, best.toml, the cache and `resume` use the new metrics; what they replace stays in the ledger.
    """
    changed = overrides_of(overrides)
    loaded = reopen(output, changed) if scenario is None else load(scenario, set=changed)
    runs = [r for r in loaded.runs if isinstance(r.workload, CommandConfig) and run in (None, r.name)]
    if not runs:
        raise LedgerError(f"{output} has no run{'' if run is None else f' {run!r}'} whose workload is a command.")
    readable = 0
    with ExitStack() as stack:
        if write:
            stack.enter_context(hold(output))
        for config in runs:
            path = output / config.name / "ledger.db"
            with Ledger.open(path) if write else Ledger.read(path) as ledger:
                readable += _reread(ledger, config, write=write, json=json)
        code = write_all(output) if write else 0
    raise typer.Exit(code if readable else 1)


def _reread(ledger: Ledger, config: Any, *, write: bool, json: bool) -> int:
    """Read the trials of one run again and show what changes; returns how many have metrics now."""
    counts: Counter[str] = Counter()
    best: tuple[float, Trial] | None = None
    id = 1 + len(ledger.state("rereads", []))
    objectives, results = Objectives(config.reward), dict[str, Result]()
    for trial in list(ledger.trials(where="outcome IN ('ok', 'metric_missing')")):
        if trial.cached_from is not None:  # a copy; one from another campaign has nothing to read
            if write and trial.cached_from in results:
                _revise(ledger, trial, replace(results[trial.cached_from], cached_from=trial.cached_from), id)
            continue
        directory = ledger.path.parent / "trials" / str(trial.number)
        for name, fidelity in config.fidelity.items():
            directory /= f"{name}-{fidelity.high}"
        if not directory.is_dir():
            counts["without output"] += 1
            continue
        result = _read(config, objectives, trial, directory)
        now = "ok" if result.outcome is Outcome.OK else "missing"
        was = "ok" if trial.outcome is Outcome.OK else "missing"
        is_same = was == now == "ok" and (dict(result.metrics), result.reward) == (dict(trial.metrics), trial.reward)
        still = "still missing" if now == "missing" else "as before" if is_same else "changed"
        counts[still if was == now else f"{was} → {now}"] += 1
        if result.reward is not None and (best is None or result.reward.value > best[0]):
            best = result.reward.value, trial
        if not is_same:
            results[str(trial.number)] = result
            if write:
                _revise(ledger, trial, result, id)
        if json:
            emit({"event": "trial", "trial": trial.number, "id": id, "before": _facts(trial), **_facts(result)})
    if write:
        ledger.set_state("rereads", [*ledger.state("rereads", []), {"id": id, "counts": counts}])
    readable = sum(count for name, count in counts.items() if name in ("as before", "changed", "missing → ok"))
    if json:
        emit({"event": "result", "run": config.name, "counts": counts, "best": best and best[1].number})
        return readable
    parts = ", ".join(f"{number(count)} {name}" for name, count in sorted(counts.items())) or "no finished trials"
    show(f"{config.name}: {parts}")
    if best is not None:
        show(f"best single trial now: {best[1].number}   with  {pairs(best[1].action)}", indent=2)
    hint = "stored, and the reports rebuilt" if write else "nothing was written; --write stores the metrics"
    show(hint, indent=2)
    return readable


def _read(config: Any, objectives: Objectives, trial: Trial, directory: Path) -> Result:
    try:
        result = read_metrics(config.workload.all_metrics(), directory, trial.usage)
    except PatternTimeout as error:
        return Result(Outcome.METRIC_MISSING, reason=str(error), usage=trial.usage)
    return objectives.scored(result) if result.outcome is Outcome.OK else result


def _revise(ledger: Ledger, trial: Trial, result: Result, id: int) -> None:
    """Make this the result of a finished trial, and keep the one before it."""
    if trial.outcome is None or _facts(trial) == _facts(result):
        return
    earlier = orjson.loads(ledger.payload(trial.number, "reread") or b"[]")
    revision = {"id": id, "before": _facts(trial), **_facts(result)}
    ledger.put_payload(trial.number, "reread", orjson.dumps([*earlier, revision]))
    ledger.commit(trial, result, replaces=trial.outcome)


def _facts(result: Trial | Result) -> dict[str, Any]:
    reward = None if result.reward is None else result.reward.value
    return {"outcome": result.outcome, "metrics": result.metrics, "reward": reward, "reason": result.reason}
