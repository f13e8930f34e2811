"""`loopwright audit`: whether what was captured is what was sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopwright.cli.options import RunOption, emit

if TYPE_CHECKING:
    from loopwright.engines.inprocess.engine import TransformersConfig
    from loopwright.gateway.audit import AuditSummary, EpisodeSource, TurnAudit

NAME = "audit"


def command(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The output directory of a run with rollouts, or of a gateway.")
    ],
    *,
    run: RunOption = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", "-e", help="The model: smollm2, tiny, or a directory. The run's own by default."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights",
            metavar="[VERSION=]DIR",
            help="The checkpoint of a version, or a directory of checkpoints whose names end in their versions.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="How far the logprob of any token may be off.")
    ] = 1e-3,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per turn, then the summary.")] = False,
) -> None:
    """Compute the logprobs of captured episodes anew, with a forward pass, and show how far they are off.

    Ends with 1 if a token is off by more than the tolerance, or if there was nothing to look at.
    """
    from loopwright.gateway.audit import AuditSummary, audit, versions_of

    with _captured(output, run) as (captured, about, kept, scenario):
        model = _model(engine, about)
        counts = versions_of(captured)
        places: dict[int, Path | None] = {0: None, **kept, **_weights(weights or [], counts)}
        at_hand = {version: place for version, place in places.items() if version in counts}
        summary = AuditSummary(left_out={v: count for v, count in counts.items() if v not in at_hand})
        if at_hand:
            from loopwright.engines.inprocess.forward import Forward

            if not json:
                typer.echo(f"reading with {model.model!r} in {model.dtype}", err=True)
            total = sum(counts[version] for version in at_hand)
            for turns in _shown(audit(captured, Forward(model, scenario), at_hand), total, hidden=json):
                for turn in turns:
                    summary.add(turn)
                    if json:
                        emit({"event": "turn", **turn.as_json()})
    good = summary.within(tolerance)
    if json:
        emit({"event": "result", "good": good, "tolerance": tolerance, **summary.as_json()})
    else:
        _show(summary, tolerance)
    raise typer.Exit(0 if good else 1)


@contextmanager
def _captured(
    output: Path, run: str | None
) -> "Iterator[tuple[EpisodeSource, dict[str, Any] | None, dict[int, Path], Path]]":
    """The episodes, what the run says of its engine, the weights of versions that it kept, and its scenario."""
    from loopwright.cli.rollout_run import rollout_run
    from loopwright.gateway.audit import STORE, in_gateway, in_ledger, weights_in
    from loopwright.ledger.ledger import Ledger
    from loopwright.ledger.steps import steps

    if (output / STORE).is_file():
        with in_gateway(output / STORE) as captured:
            yield captured, None, {}, Path.cwd()
        return
    path = rollout_run(output, run)
    with Ledger.read(path) as ledger:
        about = ledger.state("run")["rollout"]["engine"]
        scenario = Path(ledger.state("provenance", {}).get("scenario", "")).parent
        trained = [step.step for step in steps(ledger, "train")]
    kept, policy = weights_in(path.parent / "checkpoints"), path.parent / "policy"
    if trained and policy.is_dir():  # written once the last step is done
        kept[trained[-1]] = policy
    with in_ledger(path) as captured:
        yield captured, about, kept, scenario


def _model(name: str | None, about: "dict[str, Any] | None") -> "TransformersConfig":
    """The model to read with: the one that is named, or that the run was sampled with."""
    from loopwright.engines.inprocess.engine import TransformersConfig
    from loopwright.engines.shortcuts import engine_config

    if name is None:
        if about is not None and about["type"] == "transformers":
            return TransformersConfig.model_validate(about)
        why = "a gateway does not keep its model" if about is None else f"engine {about['type']!r} has no model here"
        raise typer.BadParameter(f"{why}: say which it was, tiny, smollm2 or a directory.", param_hint="--engine")
    try:
        found = engine_config(name)
    except ValueError as error:
        if not Path(name).is_dir():
            raise typer.BadParameter(f"{error} Or give the directory of a model.", param_hint="--engine") from error
        found = TransformersConfig(model=str(Path(name).absolute()))
    if not isinstance(found, TransformersConfig):
        raise typer.BadParameter(f"{name!r} is no model that can be read with.", param_hint="--engine")
    return found


def _weights(given: list[str], counts: dict[int, int]) -> dict[int, Path]:
    """The checkpoints that are given, by version."""
    from loopwright.gateway.audit import weights_in

    found: dict[int, Path] = {}
    for text in given:
        version, equals, name = text.partition("=")
        place = Path(name if equals else text)
        if not place.exists():
            raise typer.BadParameter(f"there is no {place}.", param_hint="--weights")
        if equals and version.isdecimal():
            found[int(version)] = place
        elif below := weights_in(place):
            found |= below
        elif len(counts) == 1:
            found[next(iter(counts))] = place
        else:
            versions = ", ".join(map(str, counts)) or "none"
            raise typer.BadParameter(
                f"whose weights are in {place}? The episodes are of versions {versions}: write VERSION={place}.",
                param_hint="--weights",
            )
    return found


def _shown(found: "Iterator[list[TurnAudit]]", total: int, *, hidden: bool) -> "Iterator[list[TurnAudit]]":
    """The same, with a bar that grows."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("turns"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=hidden or not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        for turns in found:
            progress.advance(task, len(turns))
            yield turns


def _show(summary: "AuditSummary", tolerance: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from loopwright.reports.formatting import number

    console = Console(highlight=False, emoji=False)
    if left_out := summary.left_out:
        console.print(
            f"{number(sum(left_out.values()))} turns left out: the weights of versions {', '.join(map(str, left_out))} "
            f"are not at hand (--weights {min(left_out)}=DIR; of a training, see `checkpoint_every` and `keep`)",
            markup=False,
            soft_wrap=True,
        )
    if summary.mean is None or summary.largest is None:
        console.print("nothing was looked at", markup=False)
        return
    table = Table("episode", "node", "version", "tokens", "mean |Δ|", "largest |Δ|", box=None, padding=(0, 2))
    for turn in summary.worst:
        values = (turn.node, turn.version, len(turn.off_by), f"{turn.mean:.1e}", f"{turn.largest:.1e}")
        table.add_row(escape(turn.episode), *map(str, values))
    console.print("the turns that are off most:")
    console.print(table)
    console.print(
        f"{number(summary.tokens)} tokens of {number(summary.turns)} turns: |Δ logprob| {summary.mean:.1e} on average, "
        f"{summary.largest:.1e} at most",
        markup=False,
        soft_wrap=True,
    )
    verdict = "what was captured is what was sampled" if summary.within(tolerance) else "NOT what was sampled"
    console.print(f"{verdict} (tolerance {tolerance:g})", markup=False)
