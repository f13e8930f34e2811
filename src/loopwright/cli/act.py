"""`loopwright act`: what a trained policy does under a regime, and on an observation if it is live."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loopwright.agents.rl.policy import PolicyError, act
from loopwright.cli.options import assignment, json_or_text


def command(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="The `policy` folder of a run.")],
    *,
    regime: Annotated[
        list[str], typer.Option("--regime", metavar="NAME=VALUE", help="A drawn parameter; may be repeated.")
    ] = [],  # noqa: B006
    observation: Annotated[
        str | None,
        typer.Option("--observation", metavar="JSON", help="The observation of a live policy, as JSON."),
    ] = None,
) -> None:
    """Apply a trained policy. Prints the action as JSON."""
    values: dict[str, Any] = {}
    for text in regime:
        name, value = assignment(text, "--regime")
        if name in values:
            raise PolicyError(f"--regime {name} is given twice; a regime has one value for each parameter")
        values[name] = value
    typer.echo(json.dumps(act(policy, values, None if observation is None else json_or_text(observation))))
