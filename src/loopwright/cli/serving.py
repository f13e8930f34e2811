"""What the verbs that serve share: settings, a token, and a clean shutdown."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from loopwright.core.config import explain
from loopwright.execution.local.processes import IGNORED
from loopwright.gateway.settings import read_token

M = TypeVar("M", bound=BaseModel)
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory, a name on the hub, or `bytes`.")
]


def parse_settings(model: type[M], settings: dict[str, Any]) -> M:
    """The settings as a config. Reports what is wrong with them as a bad option."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(f"{key}: {message}" for key, message in explain(error, model))) from error


def token_from(file: Path) -> str:
    """The token in a file."""
    try:
        return read_token(file)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--token-file") from error


def next_signal() -> "asyncio.Future[int]":
    """Completes with the number of the next SIGINT or SIGTERM. A signal that is ignored stays ignored."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[int] = loop.create_future()

    def receive(number: int) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in IGNORED:
            loop.add_signal_handler(number, receive, number)
    return received


def exit_on_next_signal() -> None:
    """Let the next signal end the process at once; what is committed is on disk."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if asyncio.get_running_loop().remove_signal_handler(number):
            signal.signal(number, signal.SIG_DFL)


def notice(text: str) -> None:
    """Print a message to stderr, beside the result."""
    typer.echo(text, err=True)
