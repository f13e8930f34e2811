"""`loopwright audit`: check that what was captured is what was sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.cli.options import RunOption, emit, progress_bar
from loopwright.cli.rollout_run import rollout_ledger
from loopwright.engines.inprocess.engine import TransformersConfig
from loopwright.engines.shortcuts import engine_config
from loopwright.gateway.audit import (
    CHECKPOINTS,
    STORE,
    AuditSummary,
    EpisodeSource,
    ExternalCheckpoints,
    audit,
    count_versions,
    find_checkpoints,
    gateway_episodes,
    ledger_episodes,
)
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import steps
from loopwright.reports.formatting import number


def command(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The output directory of a run with rollouts, or of a gateway.")
    ],
    *,
    run: RunOption = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            "-e",
            metavar="ENGINE",
            help="The model: smollm2, tiny, or a directory. The run's own by default.",
        ),
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
        float, typer.Option("--tolerance", metavar="NUMBER", min=0.0, help="The largest difference of a logprob.")
    ] = 1e-3,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object per turn, then the summary.")] = False,
) -> None:
    """Recompute the logprobs of captured episodes with a forward pass, and show the differences.

    Exits with 1 if a token differs by more than the tolerance, or if there was nothing to audit.
    """
    with _open_episodes(output, run) as (source, engine_data, checkpoints, external, scenario_dir):
        model = _model(engine, engine_data)
        counts = count_versions(source)
        paths: dict[int, Path | None] = {0: None, external.initial_version or 0: None, **external.find()}
        paths |= {**checkpoints, **_weights(weights or [], counts, external)}
        available = {version: path for version, path in paths.items() if version in counts}
        summary = AuditSummary(skipped={v: count for v, count in counts.items() if v not in available})
        if available:
            from loopwright.engines.inprocess.forward import Forward

            if not json:
                typer.echo(f"auditing with {model.model!r} in {model.dtype}", err=True)
            total = sum(counts[version] for version in available)
            with progress_bar("turns", total, hidden=json) as advance:
                for turns in audit(source, Forward(model, scenario_dir), available):
                    for turn in turns:
                        summary.add(turn)
                        if json:
                            emit({"event": "turn", **turn.as_json()})
                    advance(len(turns))
    is_good = summary.within(tolerance)
    if json:
        emit({"event": "result", "good": is_good, "tolerance": tolerance, **summary.as_json()})
    else:
        _show(summary, tolerance)
    raise typer.Exit(0 if is_good else 1)


@contextmanager
def _open_episodes(
    output: Path, run: str | None
) -> Iterator[tuple[EpisodeSource, dict[str, Any] | None, dict[int, Path], ExternalCheckpoints, Path]]:
    """The episodes, the run's engine configuration, its checkpoints by version, those of another trainer, and the
    directory of its scenario."""
    if (output / STORE).is_file():
        with gateway_episodes(output / STORE) as source:
            yield source, None, {}, ExternalCheckpoints(""), Path.cwd()
        return
    path = rollout_ledger(output, run)
    with Ledger.read(path) as ledger:
        engine_data = ledger.state("run")["rollout"]["engine"]
        scenario_dir = Path(ledger.state("provenance", {}).get("scenario", "")).parent
        train_steps = [step.step for step in steps(ledger, "train")]
        external = ExternalCheckpoints(**ledger.state(CHECKPOINTS, {"directory": ""}))
    checkpoints, policy = find_checkpoints(path.parent / "checkpoints"), path.parent / "policy"
    if train_steps and policy.is_dir():  # written after the last step
        checkpoints[train_steps[-1]] = policy
    with ledger_episodes(path) as source:
        yield source, engine_data, checkpoints, external, scenario_dir


def _model(name: str | None, engine_data: dict[str, Any] | None) -> TransformersConfig:
    """The model for the forward pass: the one with this name, or the run's."""
    if name is None:
        if engine_data is not None and engine_data["type"] == "transformers":
            return TransformersConfig.model_validate(engine_data)
        reason = "a gateway does not record its model"
        if engine_data is not None:
            reason = f"engine {engine_data['type']!r} has no model here"
        raise typer.BadParameter(f"{reason}: set it to tiny, smollm2 or a directory.", param_hint="--engine")
    try:
        config = engine_config(name)
    except ValueError as error:
        if not Path(name).is_dir():
            raise typer.BadParameter(f"{error} Or use the directory of a model.", param_hint="--engine") from error
        config = TransformersConfig(model=str(Path(name).absolute()))
    if not isinstance(config, TransformersConfig):
        raise typer.BadParameter(f"{name!r} is not a model for a forward pass.", param_hint="--engine")
    return config


def _weights(options: list[str], counts: dict[int, int], external: ExternalCheckpoints) -> dict[int, Path]:
    """The checkpoints of --weights, by version."""
    paths: dict[int, Path] = {}
    for text in options:
        version, equals, name = text.partition("=")
        path = Path(name if equals else text)
        if not path.exists():
            raise typer.BadParameter(f"{path} does not exist.", param_hint="--weights")
        if equals and version.isdecimal():
            paths[int(version)] = path
        elif checkpoints := external.find(path):
            paths |= checkpoints
        elif len(counts) == 1:
            paths[next(iter(counts))] = path
        else:
            versions = ", ".join(map(str, counts)) or "none"
            raise typer.BadParameter(
                f"which version is {path}? The episodes have versions {versions}: write VERSION={path}.",
                param_hint="--weights",
            )
    return paths


def _show(summary: AuditSummary, tolerance: float) -> None:
    console = Console(highlight=False, emoji=False)
    if skipped := summary.skipped:
        console.print(
            f"{number(sum(skipped.values()))} turns skipped: no weights for versions {', '.join(map(str, skipped))} "
            f"(use --weights {min(skipped)}=DIR; for a training run, see `checkpoint_every` and `keep`)",
            markup=False,
            soft_wrap=True,
        )
    if summary.mean is None or summary.largest is None:
        console.print("nothing to audit", markup=False)
        return
    table = Table("episode", "node", "version", "tokens", "mean |Δ|", "largest |Δ|", box=None, padding=(0, 2))
    for turn in summary.worst:
        values = (turn.node, turn.version, len(turn.differences), f"{turn.mean:.1e}", f"{turn.largest:.1e}")
        table.add_row(escape(turn.episode), *map(str, values))
    console.print("the turns with the largest differences:")
    console.print(table)
    console.print(
        f"{number(summary.tokens)} tokens of {number(summary.turns)} turns: |Δ logprob| {summary.mean:.1e} on average, "
        f"at most {summary.largest:.1e}",
        markup=False,
        soft_wrap=True,
    )
    verdict = "what was captured is what was sampled" if summary.within(tolerance) else "NOT what was sampled"
    console.print(f"{verdict} (tolerance {tolerance:g})", markup=False)
