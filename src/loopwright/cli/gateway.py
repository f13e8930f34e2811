"""`loopwright gateway`: put an engine on the wire, and capture what agents do with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopwright.cli.options import assignment

if TYPE_CHECKING:
    from loopwright.engines.base import Engine
    from loopwright.gateway.gateway import GatewayConfig

NAME = "gateway"
app = typer.Typer(help="Serve an engine to any agent, and capture it token by token.", no_args_is_help=True)


@app.callback()
def _gateway() -> None:
    """So that `serve` is a word of its own."""


@app.command("serve")
def serve(
    engine: Annotated[str, typer.Option("--engine", "-e", help="scripted, tiny, smollm2, or `kind:address`.")],
    *,
    port: Annotated[int, typer.Option("--port", "-p", help="Where to listen; 0 for any that is free.")] = 8400,
    host: Annotated[str, typer.Option("--host", help="By default only this machine is let in.")] = "127.0.0.1",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where sessions are kept; without it they end with the process."),
    ] = None,
    advertise: Annotated[str | None, typer.Option("--advertise", help="The URL that agents are given.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Who holds this token may open sessions and read all of them.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines open sessions without a token.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of the gateway, or engine.NAME=VALUE; VALUE is JSON or text."),
    ] = None,
) -> None:
    """Serve sessions until Ctrl-C. POST /sessions opens one; its agent gets the base URL and the key."""
    from loopwright.core.eventloop import run

    words = {"host": host, "port": port, **({} if advertise is None else {"advertise": advertise})}
    config, made = _made(engine, words, settings or [])
    token = None if token_file is None else _token(token_file)
    if config.public and token is None and not public:
        raise typer.BadParameter(
            f"{config.host} lets other machines in. Say who may open sessions with --token-file, or say --public.",
            param_hint="--host",
        )
    raise typer.Exit(128 + run(_serve(made, config, output, token)))


async def _serve(engine: "Engine", config: "GatewayConfig", output: Path | None, token: str | None) -> int:
    import asyncio
    import gc
    import signal

    from loopwright.gateway.gateway import Gateway

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        async with Gateway(engine, config, output=output, token=token) as gateway:
            # Requests are short-lived data without cycles: looking for some after every 700 of them costs a fifth.
            gc.freeze()
            gc.set_threshold(100_000, 20, 100)
            typer.echo(f"serving sessions at {gateway.address}; open one with POST {gateway.address}/sessions")
            return await ended
    finally:
        await engine.close()


def _made(name: str, words: dict[str, Any], settings: list[str]) -> tuple["GatewayConfig", "Engine"]:
    """The gateway's settings and its engine; what --set says comes over the other options."""
    from pydantic import ValidationError

    from loopwright.core.config import explain
    from loopwright.engines.base import engines
    from loopwright.engines.named import engine_config
    from loopwright.gateway.gateway import GatewayConfig

    more: dict[str, Any] = {}
    for text in settings:
        key, value = assignment(text, "--set")
        (more if key.startswith("engine.") else words)[key.removeprefix("engine.")] = value
    try:
        config = GatewayConfig.model_validate(words)
        chosen = engine_config(name)
        chosen = type(chosen).model_validate({**chosen.model_dump(exclude_unset=True), **more})
    except ValidationError as error:
        model = GatewayConfig if error.title == GatewayConfig.__name__ else type(chosen)
        raise typer.BadParameter("; ".join(f"{key}: {said}" for key, said in explain(error, model))) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    if problems := chosen.problems(Path.cwd()):
        raise typer.BadParameter("; ".join(map(str, problems)), param_hint="--engine")
    config.address(config.port)  # before the engine, which takes its time to load
    typer.echo(f"loading engine {name!r}", err=True)
    return config, engines.get(chosen.type)(chosen, Path.cwd())


def _token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--token-file") from error
    if len(token) < 16:
        raise typer.BadParameter(f"{file} holds no token of 16 characters or more.", param_hint="--token-file")
    return token
