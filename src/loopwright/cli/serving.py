"""What verbs that serve share: settings, a token, and an end in good order."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    import asyncio

    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


def checked(model: type[M], words: dict[str, Any]) -> M:
    """The settings as a config; what is wrong with them is told as that of an option."""
    from pydantic import ValidationError

    from loopwright.core.config import explain

    try:
        return model.model_validate(words)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(f"{key}: {said}" for key, said in explain(error, model))) from error


def token_of(file: Path) -> str:
    """The token that a file holds."""
    from loopwright.gateway.settings import read_token

    try:
        return read_token(file)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--token-file") from error


def signalled() -> "asyncio.Future[Any]":
    """The next signal to end; one that was ignored when the process started stays ignored."""
    import asyncio
    import signal

    from loopwright.core.runtime import is_ignored

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if not is_ignored(number):
            loop.add_signal_handler(number, end, number)
    return ended


def die_next_time() -> None:
    """Have the next signal end the process where it stands: what is committed is on disk."""
    import asyncio
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        if asyncio.get_running_loop().remove_signal_handler(number):
            signal.signal(number, signal.SIG_DFL)


def say(text: str) -> None:
    """Tell whoever watches, beside the result."""
    typer.echo(text, err=True)
