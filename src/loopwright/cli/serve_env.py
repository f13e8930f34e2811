"""`loopwright serve-env`: serve an environment to clients."""

from pathlib import Path
from typing import Annotated

import typer

from loopwright.cli.options import assignment
from loopwright.envs.live.regime_server import RegimeServer, ServerTarget, constructor_args
from loopwright.envs.live.serve import serve
from loopwright.envs.live.server import GymServer, ServerError, check_server_class
from loopwright.envs.live.wire import encode_space


def command(
    environment: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT", help="`module:Class`, or `gymnasium:ID` for a registered one.")
    ],
    address: Annotated[
        str,
        typer.Option(
            "--address", "-a", metavar="ADDRESS", help="Where to listen: unix:///path/to.sock or tcp://host:port."
        ),
    ],
    *,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="An argument of its constructor; VALUE is JSON or text. May be repeated.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines connect, without a password.")] = False,
) -> None:
    """Serve an environment over a socket: each client gets its own instance. Ctrl-C stops it.

    Arguments of its constructor that are not set with --arg can be drawn by the client, per episode.
    """
    args, directory = dict(assignment(text, "--arg") for text in arg or ()), Path.cwd()
    if reason := check_server_class(environment, directory):
        raise ServerError(reason)

    target = ServerTarget(environment, args, directory=directory)
    settable = {*(constructor_args(environment, directory) or ())} - args.keys()

    def make() -> GymServer:
        return RegimeServer(target, settable)

    # Made once as a test, so that wrong arguments are reported here and not to the first client.
    first = make()
    try:
        encode_space(first.observation_space), encode_space(first.action_space)
    finally:
        first.close()
    received = serve(make, address, public=public, ready=lambda at: typer.echo(f"serving {environment} at {at}"))
    raise typer.Exit(128 + received if received else 0)
