"""`loopwright reread`: read metrics again from the output that trials left, for example with a corrected pattern."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from loopwright.cli.options import OutputArgument, RunOption, emit
from loopwright.cli.overrides import Overrides, overrides_of
from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome
from loopwright.core.reward import Objectives
from loopwright.core.trial import Result, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import number, short
from loopwright.scenario.dispatch import hold, reopen
from loopwright.scenario.load import load
from loopwright.workloads.command import PatternTimeout, read_metrics
from loopwright.workloads.command_config import CommandConfig


def command(
    output: OutputArgument,
    *,
    run: RunOption = None,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", "-s", help="The corrected scenario; by default the one of the run.")
    ] = None,
    overrides: Overrides = None,
    write: Annotated[
        bool, typer.Option("--write", help="Store the new metrics in the ledger, beside the old ones.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per trial, then the summary.")] = False,
) -> None:
    """Read the metrics of finished trials again. Nothing is run, and what was recorded is never overwritten."""
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
            ledger = stack.enter_context(Ledger.open(path) if write else Ledger.read(path))
            readable += _reread(ledger, config, write=write, json=json)
    raise typer.Exit(0 if readable else 1)


def _reread(ledger: Ledger, config: Any, *, write: bool, json: bool) -> int:
    """Read the trials of one run again and show what changes; returns how many have metrics now."""
    counts: Counter[str] = Counter()
    best: tuple[float, Trial] | None = None
    id = 1 + len(ledger.state("rereads", []))
    objectives = Objectives(config.reward)
    for trial in list(ledger.trials(where="outcome IN ('ok', 'metric_missing') AND cached_from IS NULL")):
        directory = ledger.path.parent / "trials" / str(trial.number)
        for name, fidelity in config.fidelity.items():
            directory /= f"{name}-{fidelity.high}"
        if not directory.is_dir():
            counts["without output"] += 1
            continue
        result, value = _read(config, objectives, trial, directory)
        now = "ok" if result.outcome is Outcome.OK else "missing"
        was = "ok" if trial.outcome is Outcome.OK else "missing"
        is_same = was == now == "ok" and dict(result.metrics) == dict(trial.metrics)
        still = "still missing" if now == "missing" else "as before" if is_same else "changed"
        counts[still if was == now else f"{was} → {now}"] += 1
        if value is not None and (best is None or value > best[0]):
            best = value, trial
        revision = {"id": id, "metrics": result.metrics, "reward": value, "reason": result.reason}
        if write and not is_same:
            earlier = orjson.loads(ledger.payload(trial.number, "reread") or b"[]")
            ledger.put_payload(trial.number, "reread", orjson.dumps([*earlier, revision]))
        if json:
            emit({"event": "trial", "trial": trial.number, "before": trial.metrics, **revision})
    if write:
        ledger.set_state("rereads", [*ledger.state("rereads", []), {"id": id, "counts": counts}])
    readable = sum(count for name, count in counts.items() if name in ("as before", "changed", "missing → ok"))
    if json:
        emit({"event": "result", "run": config.name, "counts": counts, "best": best and best[1].number})
        return readable
    console = Console(highlight=False, emoji=False)
    parts = ", ".join(f"{number(count)} {name}" for name, count in sorted(counts.items())) or "no finished trials"
    console.print(f"{config.name}: {parts}", markup=False, soft_wrap=True)
    if best is not None:
        console.print(f"  best now: trial {best[1].number}, {short(str(dict(best[1].action)), 100)}", markup=False)
    hint = "stored in the ledger beside the old metrics" if write else "nothing was written; --write stores the metrics"
    console.print(f"  {hint}")
    return readable


def _read(config: Any, objectives: Objectives, trial: Trial, directory: Path) -> tuple[Result, float | None]:
    try:
        result = read_metrics(config.workload.all_metrics(), directory, trial.usage)
        reward = objectives.score(result.metrics) if result.outcome is Outcome.OK else None
    except PatternTimeout as error:
        return Result(Outcome.METRIC_MISSING, reason=str(error)), None
    except (ArithmeticError, ValueError, TypeError, KeyError) as error:
        return Result(Outcome.METRIC_MISSING, reason=f"the metrics have no reward: {error}"), None
    return result, None if reward is None else reward.value
