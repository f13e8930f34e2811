"""`loopwright export`: a run's trials, episodes, training rows or steps as files for other tools."""

import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import GroupOption, OutputArgument, TaskOption
from loopwright.cli.rollout_run import check_selection
from loopwright.core.errors import LedgerError
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import run_ledgers
from loopwright.ledger.rollouts import ALL, Selection
from loopwright.reports.export import write_csv, write_parquet
from loopwright.reports.kinds import kind_of
from loopwright.reports.rollout import export as rollouts
from loopwright.reports.search.optuna_export import write_optuna
from loopwright.reports.training import export as steps_export
from loopwright.trainers.export.gguf import write_gguf


class Format(StrEnum):
    """The formats that a run can be exported to."""

    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"
    VERL = "verl"
    OPTUNA = "optuna"
    GGUF = "gguf"


_ROWS: dict[Format, Callable[[Ledger, Path, Selection], Path]] = {
    Format.PARQUET: rollouts.write_parquet_rows,
    Format.JSONL: rollouts.write_rows,
    Format.VERL: rollouts.write_verl,
}
_STEPS: dict[Format, Callable[[Ledger, Path], Path]] = {
    Format.CSV: steps_export.write_csv_steps,
    Format.PARQUET: steps_export.write_parquet_steps,
    Format.JSONL: steps_export.write_json_steps,
}
_NOTHING = {
    Format.OPTUNA: "no run in {output} is a search, so it has no study to export.",
    Format.GGUF: "no run in {output} has a policy yet: it is written after the last step of training.",
}
_NO_STEPS = "no run in {output} has trained anything yet, so there are no steps."
_NO_ROLLOUTS = "there are no rollouts in {output}, so no episodes or rows. Use --format csv or parquet."


def command(
    output: OutputArgument,
    *,
    format: Annotated[
        Format, typer.Option("--format", "-f", help="The file format; jsonl (episodes) and verl are for rollouts.")
    ] = Format.CSV,
    rows: Annotated[
        bool, typer.Option("--rows", help="For rollouts, the rows to train on; as parquet, jsonl or verl.")
    ] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="For training runs, the numbers of each step; as csv, parquet or jsonl.")
    ] = False,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run; by default all.")] = None,
    group: GroupOption = None,
    task: TaskOption = None,
) -> None:
    """Export each run beside its ledger.

    \b
    csv              trajectory.csv and env.csv: the trials
    parquet          trials.parquet: the trials
    optuna           optuna.db: a study per search
    jsonl            episodes.jsonl: whole episodes of rollouts
    --rows           rows.parquet or rows.jsonl: one training row per branch
    verl             verl.jsonl: training rows as verl's AgentLoopOutput
    --steps          steps.csv, .parquet or .jsonl: each training step
                     and evaluation
    gguf             policy/policy.gguf: a trained policy for llama.cpp

    --group and --task choose among the episodes or rows of rollouts.
    """
    which = Selection(group, task)
    if problem := _problem_of(format, which, rows=rows, steps=steps):
        raise typer.BadParameter(problem)
    ledgers = run_ledgers(output, run)
    # So that nothing half written stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    files: list[Path] = []
    for path in ledgers.values():
        with Ledger.read(path) as ledger:
            has_rollouts = kind_of(ledger.state("run", {})) in ("rollout", "training")
            if has_rollouts and len(ledgers) == 1:
                check_selection(ledger, which)
            if steps:
                new = [_STEPS[format](ledger, path.parent)] if steps_export.has_steps(ledger) else []
            elif rows or format in (Format.VERL, Format.JSONL):
                write = _ROWS[format] if rows or format is Format.VERL else rollouts.write_episodes
                new = [write(ledger, path.parent, which)] if has_rollouts else []
            else:
                new = _write_run(ledger, path.parent, format)
        for file in new:
            typer.echo(file)
        files += new
    if not files:
        reason = _NO_STEPS if steps else _NOTHING.get(format, _NO_ROLLOUTS)
        raise LedgerError(reason.format(output=output))


def _problem_of(format: Format, which: Selection, *, rows: bool, steps: bool) -> str | None:
    """Why these options do not go together."""
    if format in (Format.OPTUNA, Format.GGUF) and (steps or rows):
        return f"{format} files have neither rows nor steps; remove --rows and --steps."
    if steps and (rows or format is Format.VERL):
        return "--steps are exported as csv, parquet or jsonl, and without --rows."
    if rows and format is Format.CSV:
        return "rows of tokens do not fit into CSV; add --format parquet, jsonl or verl."
    if which != ALL and (steps or not (rows or format in (Format.JSONL, Format.VERL))):
        return "--group and --task choose episodes or rows; add --format jsonl, --format verl or --rows."
    return None


def _write_run(ledger: Ledger, directory: Path, format: Format) -> list[Path]:
    """A run as a whole; nothing if it has nothing of that format."""
    match format:
        case Format.OPTUNA:
            is_search = kind_of(ledger.state("run", {})) == "search"
            return [write_optuna(ledger, directory / "optuna.db")] if is_search else []
        case Format.GGUF:
            policy = directory / "policy"
            return [write_gguf(policy)] if (policy / "config.json").is_file() else []
        case Format.PARQUET:
            return [write_parquet(ledger, directory / "trials.parquet")]
    return write_csv(ledger, directory)
