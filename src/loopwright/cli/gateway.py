"""`loopwright gateway`: serve engines to agents, and capture every turn."""

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import orjson
import typer

from loopwright.cli.options import assignment
from loopwright.cli.serving import Tokenizer, exit_on_next_signal, next_signal, notice, parse_settings, token_from
from loopwright.core.imports import import_with_extra
from loopwright.core.runtime import run
from loopwright.engines.base import Engine, EngineConfig, engines
from loopwright.engines.fleet import FleetConfig
from loopwright.engines.named_tokenizer import tokenizer_of
from loopwright.engines.shortcuts import engine_config
from loopwright.gateway.gateway import Gateway, GatewayConfig
from loopwright.gateway.settings import GATEWAY, MIN_TOKEN_LENGTH, TOKEN, check_names, from_environment
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_config import GATEWAY_HOSTS

app = typer.Typer(help="Serve an engine to any agent, and capture it token by token.", no_args_is_help=True)
_ENGINE = "scripted, tiny, smollm2, or `kind:address`"
_AccessLog = Annotated[
    str | None,
    typer.Option(
        "--access-log", metavar="FILE", help="A file for one line of JSON per request; `-` for standard output."
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="NAME=VALUE for the gateway, engine.NAME=VALUE for its engines, or fleet.NAME=VALUE for a fleet of "
        "engines or workers; VALUE is JSON or text.",
    ),
]


@app.command("serve")
def serve(
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", "-e", metavar="ENGINE", help=f"{_ENGINE}; repeat it to share sessions among several."),
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Use the engines that connect with `loopwright gateway worker`.")
    ] = False,
    tokenizer: Tokenizer = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            "-p",
            metavar="PORT",
            envvar="REMOTE_GATEWAY_PORT",
            help="The port to listen on; 0 for any free one.",
        ),
    ] = 8400,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            envvar="REMOTE_GATEWAY_HOST",
            help="Where to listen; by default only for this machine.",
        ),
    ] = "127.0.0.1",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where sessions are stored; without it they end with the process."
        ),
    ] = None,
    advertise: Annotated[str | None, typer.Option("--advertise", metavar="URL", help="The URL for agents.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="The token to open sessions, read all of them, and connect workers."
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines open sessions without a token.")] = False,
    access_log: _AccessLog = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Include messages in the access log.")] = False,
    settings: _Settings = None,
) -> None:
    """Serve sessions until Ctrl-C. POST /sessions opens one; its agent gets the base URL and the key."""
    values = _options(host=host, port=port, advertise=advertise, access_log=access_log, log_prompts=log_prompts or None)
    tables = _settings_tables(settings or [], values)
    config = parse_settings(GatewayConfig, tables["gateway"])
    config.address(config.port)  # before the engine is loaded, which takes a while
    if config.log_prompts and config.access_log is None:
        raise typer.BadParameter("the access log is off; set its file with --access-log.", param_hint="--log-prompts")
    if relay == bool(engine):
        raise typer.BadParameter("use either --engine NAME or --relay.", param_hint="--engine")
    token = _token(token_file, config, relay=relay, public=public)
    served_engine = _relay(tokenizer, tables) if relay else load_engine(engine or [], tokenizer, tables)
    raise typer.Exit(128 + run(_serve(served_engine, config, output, token)))


async def _serve(engine: Engine, config: GatewayConfig, output: Path | None, token: str | None) -> int:
    stop_signal = next_signal()
    try:
        async with Gateway(engine, config, output=output, token=token) as gateway:
            # Requests leave no reference cycles, so a collection only costs time: objects are visited once, in small
            # numbers (5 ms), and again next to never.
            gc.freeze()
            gc.set_threshold(15_000, 12_000, 1)
            typer.echo(f"serving sessions at {gateway.address}; open one with POST {gateway.address}/sessions")
            if engine.config.type == "relay":
                typer.echo(f"workers connect to {gateway.address.replace('http', 'ws', 1)}/ws/worker", err=True)
            number: int = await stop_signal
            if calls := gateway.count()[1]:
                notice(f"stopping: {calls} calls have {config.drain_s:g} s to end; a second signal stops them now")
            exit_on_next_signal()
            return number
    finally:
        await engine.close()


@app.command("worker")
def worker(
    connect: Annotated[
        str, typer.Option("--connect", "-c", metavar="URL", help="The gateway, as ws://gateway:8400/ws/worker.")
    ],
    engine: Annotated[str, typer.Option("--engine", "-e", metavar="ENGINE", help=f"{_ENGINE}.")],
    token_file: Annotated[Path, typer.Option("--token-file", metavar="FILE", help="The gateway's token.")],
    *,
    tokenizer: Tokenizer = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Its name at the gateway; keep it across restarts.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option("--drain-s", metavar="SECONDS", help="Seconds for streams to end after Ctrl-C.")
    ] = 30.0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="engine.NAME=VALUE for the engine; VALUE is JSON or text."),
    ] = None,
) -> None:
    """Serve an engine at a gateway that runs with --relay, until Ctrl-C; a second one stops it at once."""
    if urlsplit(connect).scheme not in ("ws", "wss") or not urlsplit(connect).hostname:
        raise typer.BadParameter(f"{connect!r} is not a URL like ws://gateway:8400/ws/worker.", param_hint="--connect")
    token = token_from(token_file)
    tables = _settings_tables(settings or [], {})
    if tables["gateway"] or tables["fleet"]:
        raise typer.BadParameter("a worker has only settings for its engine: engine.NAME=VALUE.", param_hint="--set")
    served_engine = load_engine([engine], tokenizer, tables)
    raise typer.Exit(128 + run(_work(served_engine, connect, token, name, drain_s)))


async def _work(engine: Engine, url: str, token: str, name: str | None, drain_s: float) -> int:
    RelayWorker = import_with_extra("loopwright.gateway.relay.worker", "the gateway").RelayWorker  # noqa: N806  a class
    stop_signal = next_signal()
    relay_worker = RelayWorker(engine, url, token, name=name, drain_s=drain_s, say=notice)
    work: asyncio.Future[Any] = asyncio.ensure_future(relay_worker.run())
    try:
        await asyncio.wait({work, stop_signal}, return_when=asyncio.FIRST_COMPLETED)
        if not stop_signal.done():
            await work  # raises why the gateway refused it
        second_signal = next_signal()
        relay_worker.stop()
        await asyncio.wait({work, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        return int(await stop_signal)
    finally:
        work.cancel()
        await asyncio.wait([work])
        await engine.close()


# -- settings and engines -------------------------------------------------------------------------------------------


def _settings_tables(settings: list[str], gateway: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of the gateway, its engines and their fleet: --set overrides the other options."""
    tables: dict[str, dict[str, Any]] = {"gateway": gateway, "engine": {}, "fleet": {}}
    for text in settings:
        key, value = assignment(text, "--set")
        prefix, dot, name = key.partition(".")
        # An unknown prefix stays part of the key, so that validation reports it.
        table, name = (prefix, name) if dot and prefix in tables else ("gateway", key)
        tables[table][name] = value
    return tables


def _token(file: Path | None, config: GatewayConfig, *, relay: bool, public: bool) -> str | None:
    """The gateway's token, from its file or the environment; without one only this machine may connect."""
    token = os.environ.get(TOKEN) or None if file is None else token_from(file)
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise typer.BadParameter(f"{TOKEN} has fewer than {MIN_TOKEN_LENGTH} characters.")
    if relay and token is None:
        raise typer.BadParameter("workers need a token; set it with --token-file.", param_hint="--relay")
    if config.public and token is None and not public:
        raise typer.BadParameter(
            f"{config.host} is open to other machines. Protect it with --token-file, or use --public.",
            param_hint="--host",
        )
    return token


def _options(**options: Any) -> dict[str, Any]:
    """The gateway's settings: those in the environment, overridden by the options that were given."""
    try:
        check_names(os.environ, RemoteConfig, list(GATEWAY_HOSTS.values()))
        values = from_environment(GATEWAY, GatewayConfig)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error
    return values | {name: value for name, value in options.items() if value is not None}


def load_engine(names: list[str], tokenizer: str | None, tables: dict[str, dict[str, Any]]) -> Engine:
    """Load the engine of this name; a fleet for several names."""
    configs = [_engine_config(name, tokenizer, tables["engine"]) for name in names]
    config = configs[0]
    if len(configs) > 1:
        config = parse_settings(FleetConfig, {**tables["fleet"], "engines": configs})
    elif tables["fleet"]:
        raise typer.BadParameter("fleet.NAME is for several engines, or --relay.", param_hint="--set")
    if problems := config.problems(Path.cwd()):
        raise typer.BadParameter("; ".join(map(str, problems)), param_hint="--engine")
    typer.echo(f"loading {'engine' if len(names) == 1 else 'engines'} {', '.join(map(repr, names))}", err=True)
    return engines.get(config.type)(config, Path.cwd())


def _engine_config(name: str, tokenizer: str | None, more: dict[str, Any]) -> EngineConfig:
    try:
        config = engine_config(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    if tokenizer is not None:
        if "tokenizer" not in type(config).model_fields:
            raise typer.BadParameter(f"engine {name!r} has its own tokenizer.", param_hint="--tokenizer")
        more = {"tokenizer": tokenizer, **more}
    elif "tokenizer" not in more and (field := type(config).model_fields.get("tokenizer")) and field.is_required():
        model = _served_model(getattr(config, "url", ""))
        if model is None:
            raise typer.BadParameter(f"set the tokenizer of the model behind {name!r}.", param_hint="--tokenizer")
        more = {"tokenizer": model, **more}
    return parse_settings(type(config), {**config.model_dump(exclude_unset=True), **more})


def _served_model(url: str) -> str | None:
    """The model that an OpenAI-compatible server serves, if it responds: its tokenizer has the same name."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        with urlopen(f"{url.rstrip('/')}/v1/models", timeout=10.0) as response:  # noqa: S310  the config checks the URL
            model = orjson.loads(response.read(2**20))["data"][0]
        return str(model.get("root") or model["id"])
    return None


def _relay(tokenizer: str | None, tables: dict[str, dict[str, Any]]) -> Engine:
    relay: Any = import_with_extra("loopwright.gateway.relay.relay", "the gateway")
    if tables["engine"]:
        raise typer.BadParameter("set engine.NAME at the workers.", param_hint="--set")
    config = parse_settings(relay.RelayConfig, tables["fleet"])
    engine: Engine = relay.Relay(config, None if tokenizer is None else tokenizer_of(tokenizer, Path.cwd()), say=notice)
    return engine
