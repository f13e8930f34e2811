"""`loopwright trials`: run trials for trainers elsewhere."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopwright.cli.options import assignment
from loopwright.cli.serving import checked, die_next_time, say, signalled, token_of

if TYPE_CHECKING:
    from loopwright.rollouts.remote.gateway_host import GatewayHost
    from loopwright.rollouts.trial_server.server import TrialServerConfig

NAME = "trials"
app = typer.Typer(help="Run trials of agents for trainers elsewhere.", no_args_is_help=True)


@app.callback()
def _trials() -> None:
    """So that `serve` is a word of its own."""


@app.command("serve")
def serve(
    *,
    port: Annotated[int, typer.Option("--port", "-p", help="Where to listen; 0 for any that is free.")] = 8500,
    host: Annotated[str, typer.Option("--host", help="By default only this machine is let in.")] = "127.0.0.1",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where trials are kept, so that a restart loses none.")
    ] = Path("out/trials"),
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Who holds this token may run commands here; by default OUTPUT/token."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-j", help="How many trials run at a time.")] = 4,
    home: Annotated[
        Path, typer.Option("--home", help="What a loop's paths are relative to, and {home} in its command.")
    ] = Path(),
    engine: Annotated[
        str | None,
        typer.Option("--engine", "-e", help="An engine for trials that bring no gateway: as for `gateway serve`."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A directory, a name on the hub, or `bytes`.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: queue, body, artifacts, keep_s, or engine.NAME; JSON or text."),
    ] = None,
) -> None:
    """Run trials until Ctrl-C, for runs with `loop = { type = "remote", server = "http://…" }`."""
    from loopwright.core.errors import MissingExtra
    from loopwright.core.runtime import run

    try:
        from loopwright.rollouts.trial_server.server import TrialServerConfig
    except ImportError as error:
        raise MissingExtra("the trial server", "gateway") from error
    words: dict[str, Any] = {"host": host, "port": port, "concurrency": concurrency}
    given = dict(assignment(text, "--set") for text in settings or ())
    of_engine = {name.removeprefix("engine."): given.pop(name) for name in list(given) if name.startswith("engine.")}
    config = checked(TrialServerConfig, words | given)
    if config.public and token_file is None:
        raise typer.BadParameter(
            f"{config.host} lets other machines in, and whoever is let in runs commands here. Say who may with "
            "--token-file.",
            param_hint="--host",
        )
    token = _own_token(output / "token") if token_file is None else token_of(token_file)
    own = None if engine is None else _own_engine(engine, tokenizer, of_engine)
    say(f"the token is in {token_file or output / 'token'}; a run gets it by `token_file`")
    raise typer.Exit(128 + run(_serve(config, token, output, home.resolve(), own)))


async def _serve(config: "TrialServerConfig", token: str, output: Path, home: Path, own: "GatewayHost | None") -> int:
    from loopwright.rollouts.trial_server.server import TrialServer

    ended = signalled()
    async with TrialServer(config, token, output=output, scenario_dir=home, host=own, say=say) as server:
        typer.echo(f"serving trials at {server.address}, {config.concurrency} at a time")
        counts = server.queue.counts()
        if waiting := counts.get("queued", 0) + counts.get("running", 0):
            say(f"going on with {waiting} trials of before; {server.recovered} of them are begun again")
        number = int(await ended)
        if running := server.queue.counts().get("running", 0):
            say(f"ending: {running} trials are given back to the queue; once more ends this now")
        die_next_time()
        return number


def _own_token(file: Path) -> str:
    """A token that only whoever may read our files can have; other users of this machine are not to run commands."""
    import secrets

    from loopwright.core.errors import storage

    if not file.exists():
        with storage(file, then="nothing was started"):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".token.{os.getpid()}")
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
                opened.write(secrets.token_urlsafe(24))
            part.rename(file)
    return token_of(file)


def _own_engine(name: str, tokenizer: str | None, more: dict[str, Any]) -> "GatewayHost":
    from loopwright.cli.gateway import load_engine
    from loopwright.gateway.gateway import GatewayConfig
    from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost

    made = load_engine([name], tokenizer, {"engine": more, "fleet": {}})
    return EmbeddedGatewayHost(GatewayConfig(), lambda: made)
