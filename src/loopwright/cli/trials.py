"""`loopwright trials`: run trials for trainers on other machines."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.gateway import load_engine
from loopwright.cli.options import assignment
from loopwright.cli.serving import Tokenizer, exit_on_next_signal, next_signal, notice, parse_settings, token_from
from loopwright.core.errors import storage
from loopwright.core.runtime import run
from loopwright.gateway.gateway import GatewayConfig
from loopwright.rollouts import trial_server
from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost, GatewayHost

_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="NAME=VALUE: queue, body, artifacts, keep_s, or engine.NAME; JSON or text.",
    ),
]
app = typer.Typer(help="Run trials for trainers on other machines.", no_args_is_help=True)


@app.command("serve")
def serve(
    *,
    port: Annotated[
        int, typer.Option("--port", "-p", metavar="PORT", help="The port to listen on; 0 for any free one.")
    ] = 8500,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="The address to listen on; by default only this machine can connect."
        ),
    ] = "127.0.0.1",
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where trials are stored, so that a restart loses none."),
    ] = Path("out/trials"),
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Clients with this token may run commands here; by default OUTPUT/token.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-j", metavar="N", help="How many trials run at a time.")
    ] = 4,
    home: Annotated[
        Path,
        typer.Option(
            "--home", metavar="DIR", help="The directory that a loop's paths are relative to, {home} in its command."
        ),
    ] = Path(),
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", "-e", metavar="ENGINE", help="An engine for trials without a gateway, as for `gateway serve`."
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    settings: _Settings = None,
) -> None:
    """Run trials until Ctrl-C, for runs with `loop = { type = "remote", server = "http://…" }`."""
    options = dict(assignment(text, "--set") for text in settings or ())
    names = [name for name in options if name.startswith("engine.")]
    engine_options = {name.removeprefix("engine."): options.pop(name) for name in names}
    values = {"host": host, "port": port, "concurrency": concurrency} | options
    config = parse_settings(trial_server.TrialServerConfig, values)
    if config.public and token_file is None:
        raise typer.BadParameter(
            f"{config.host} is open to other machines, and every client may run commands here. Restrict it to clients "
            "with a token: --token-file.",
            param_hint="--host",
        )
    token = _own_token(output / "token") if token_file is None else token_from(token_file)
    own = None
    if engine is not None:
        served_engine = load_engine([engine], tokenizer, {"engine": engine_options, "fleet": {}})
        own = EmbeddedGatewayHost(GatewayConfig(), lambda: served_engine)
    notice(f"the token is in {token_file or output / 'token'}; name that file as `token_file` in a run")
    raise typer.Exit(128 + run(_serve(config, token, output, home.resolve(), own)))


async def _serve(
    config: "trial_server.TrialServerConfig", token: str, output: Path, home: Path, own: GatewayHost | None
) -> int:
    stop_signal = next_signal()
    async with trial_server.TrialServer(
        config, token, output=output, scenario_dir=home, host=own, say=notice
    ) as server:
        typer.echo(f"serving trials at {server.address}, {config.concurrency} at a time")
        counts = server.queue.counts()
        if waiting := counts.get("queued", 0) + counts.get("running", 0):
            notice(f"continuing with {waiting} earlier trials; {server.recovered} of them start again")
        number = await stop_signal
        if running := server.queue.counts().get("running", 0):
            notice(f"stopping: {running} trials return to the queue; press Ctrl-C again to stop at once")
        exit_on_next_signal()
        return number


def _own_token(file: Path) -> str:
    """The token in a file that only we can read: other users of this machine must not run commands. Made if missing."""
    if not file.exists():
        with storage(file, then="nothing was started"):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".token.{os.getpid()}")
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
                stream.write(secrets.token_urlsafe(24))
            part.rename(file)
    return token_from(file)
