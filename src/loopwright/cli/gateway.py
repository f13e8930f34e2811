"""`loopwright gateway`: put engines on the wire, and capture what agents do with them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loopwright.cli.options import assignment
from loopwright.cli.serving import checked, die_next_time, say, signalled, token_of

if TYPE_CHECKING:
    from loopwright.engines.base import Engine, EngineConfig
    from loopwright.gateway.gateway import GatewayConfig

NAME = "gateway"
app = typer.Typer(help="Serve an engine to any agent, and capture it token by token.", no_args_is_help=True)
_ENGINE = "scripted, tiny, smollm2, or `kind:address`"


@app.callback()
def _gateway() -> None:
    """So that `serve` is a word of its own."""


@app.command("serve")
def serve(
    *,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help=f"{_ENGINE}; several of them share the sessions.")
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Take the engines that connect with `loopwright gateway worker`.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A directory, a name on the hub, or `bytes`.")
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", "-p", envvar="REMOTE_GATEWAY_PORT", help="Where to listen; 0 for any that is free."),
    ] = 8400,
    host: Annotated[
        str, typer.Option("--host", envvar="REMOTE_GATEWAY_HOST", help="By default only this machine is let in.")
    ] = "127.0.0.1",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where sessions are kept; without it they end with the process."),
    ] = None,
    advertise: Annotated[str | None, typer.Option("--advertise", help="The URL that agents are given.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Who holds this token may open sessions, read all of them, and be a worker."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let other machines open sessions without a token.")] = False,
    access_log: Annotated[
        str | None, typer.Option("--access-log", help="A file for a line of JSON per request; `-` for standard output.")
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Have the access log hold what was said, too.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="NAME=VALUE of the gateway, engine.NAME=VALUE of its engines, or fleet.NAME=VALUE of how several "
            "engines or workers are kept; VALUE is JSON or text.",
        ),
    ] = None,
) -> None:
    """Serve sessions until Ctrl-C. POST /sessions opens one; its agent gets the base URL and the key."""
    from loopwright.core.eventloop import run
    from loopwright.gateway.gateway import GatewayConfig

    words: dict[str, Any] = {**_environment(), "host": host, "port": port}
    told = {"advertise": advertise, "access_log": access_log, "log_prompts": log_prompts or None}
    words |= {name: value for name, value in told.items() if value is not None}
    given = _given(settings or [], words)
    config = checked(GatewayConfig, given["gateway"])
    config.address(config.port)  # before the engine, which takes its time to load
    if config.log_prompts and config.access_log is None:
        raise typer.BadParameter("there is no access log: say where with --access-log.", param_hint="--log-prompts")
    if relay == bool(engine):
        raise typer.BadParameter("say what serves: --engine NAME, or --relay and not both.", param_hint="--engine")
    token = _token(token_file, config, relay=relay, public=public)
    made = _relay(tokenizer, given) if relay else loaded(engine or [], tokenizer, given)
    raise typer.Exit(128 + run(_serve(made, config, output, token)))


async def _serve(engine: "Engine", config: "GatewayConfig", output: Path | None, token: str | None) -> int:
    import gc

    from loopwright.gateway.gateway import Gateway

    ended = signalled()
    try:
        async with Gateway(engine, config, output=output, token=token) as gateway:
            # Requests are short-lived data without cycles: looking for some after every 700 of them costs a fifth.
            gc.freeze()
            gc.set_threshold(100_000, 20, 100)
            typer.echo(f"serving sessions at {gateway.address}; open one with POST {gateway.address}/sessions")
            if engine.config.type == "relay":
                typer.echo(f"workers connect to {gateway.address.replace('http', 'ws', 1)}/ws/worker", err=True)
            number: int = await ended
            if calls := gateway.counted()[1]:
                say(f"ending: {calls} calls have {config.drain_s:g} s to come to their end; once more ends them now")
            die_next_time()
            return number
    finally:
        await engine.close()


@app.command("worker")
def worker(
    connect: Annotated[str, typer.Option("--connect", "-c", help="The gateway, as ws://gateway:8400/ws/worker.")],
    engine: Annotated[str, typer.Option("--engine", "-e", help=f"{_ENGINE}.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="The gateway's token.")],
    *,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A directory, a name on the hub, or `bytes`.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What the gateway calls it; keep it over restarts.")
    ] = None,
    drain_s: Annotated[float, typer.Option("--drain-s", help="Seconds that streams get to end on Ctrl-C.")] = 30.0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="engine.NAME=VALUE of the engine; VALUE is JSON or text.")
    ] = None,
) -> None:
    """Take an engine to a gateway that runs with --relay, until Ctrl-C; twice ends it at once."""
    from urllib.parse import urlsplit

    from loopwright.core.eventloop import run

    if urlsplit(connect).scheme not in ("ws", "wss") or not urlsplit(connect).hostname:
        raise typer.BadParameter(f"{connect!r} is no address like ws://gateway:8400/ws/worker.", param_hint="--connect")
    token = token_of(token_file)
    given = _given(settings or [], {})
    if given["gateway"] or given["fleet"]:
        raise typer.BadParameter("a worker has settings of its engine only: engine.NAME=VALUE.", param_hint="--set")
    made = loaded([engine], tokenizer, given)
    raise typer.Exit(128 + run(_work(made, connect, token, name, drain_s)))


async def _work(engine: "Engine", url: str, token: str, name: str | None, drain_s: float) -> int:
    import asyncio

    with _gateway_extra():
        from loopwright.gateway.relay.worker import RelayWorker
    ended = signalled()
    made = RelayWorker(engine, url, token, name=name, drain_s=drain_s, say=say)
    working: asyncio.Future[Any] = asyncio.ensure_future(made.run())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await working  # which says why the gateway does not want it
        again = signalled()
        made.end()
        await asyncio.wait({working, again}, return_when=asyncio.FIRST_COMPLETED)
        return int(await ended)
    finally:
        working.cancel()
        await asyncio.wait([working])
        await engine.close()


# -- what is served ------------------------------------------------------------------------------------------------


def _given(settings: list[str], words: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What --set says of the gateway, over its other options, of engines, and of how several are kept."""
    given: dict[str, dict[str, Any]] = {"gateway": words, "engine": {}, "fleet": {}}
    for text in settings:
        key, value = assignment(text, "--set")
        of, dot, name = key.partition(".")
        # A name that nobody knows is left whole: whoever checks it says so.
        table, name = (of, name) if dot and of in given else ("gateway", key)
        given[table][name] = value
    return given


def _token(file: Path | None, config: "GatewayConfig", *, relay: bool, public: bool) -> str | None:
    """The gateway's token, from its file or the environment; without one only this machine is let in."""
    from loopwright.gateway.settings import LEAST_TOKEN, TOKEN

    token = os.environ.get(TOKEN) or None if file is None else token_of(file)
    if token is not None and len(token) < LEAST_TOKEN:
        raise typer.BadParameter(f"{TOKEN} holds no token of {LEAST_TOKEN} characters or more.")
    if relay and token is None:
        raise typer.BadParameter("workers need a token: say which with --token-file.", param_hint="--relay")
    if config.public and token is None and not public:
        raise typer.BadParameter(
            f"{config.host} lets other machines in. Say who may open sessions with --token-file, or say --public.",
            param_hint="--host",
        )
    return token


def _environment() -> dict[str, Any]:
    """What the environment says of the gateway; options and --set come over it."""
    from loopwright.gateway.gateway import GatewayConfig
    from loopwright.gateway.settings import GATEWAY, from_environment

    try:
        return from_environment(GATEWAY, GatewayConfig)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def loaded(names: list[str], tokenizer: str | None, given: dict[str, dict[str, Any]]) -> "Engine":
    """The engine of a name; of several, a fleet of them."""
    from loopwright.engines.base import engines
    from loopwright.engines.fleet import FleetConfig

    configs = [_engine(name, tokenizer, given["engine"]) for name in names]
    chosen = configs[0]
    if len(configs) > 1:
        chosen = checked(FleetConfig, {**given["fleet"], "engines": configs})
    elif given["fleet"]:
        raise typer.BadParameter("fleet.NAME is for several engines, or --relay.", param_hint="--set")
    if problems := chosen.problems(Path.cwd()):
        raise typer.BadParameter("; ".join(map(str, problems)), param_hint="--engine")
    typer.echo(f"loading {'engine' if len(names) == 1 else 'engines'} {', '.join(map(repr, names))}", err=True)
    return engines.get(chosen.type)(chosen, Path.cwd())


def _engine(name: str, tokenizer: str | None, more: dict[str, Any]) -> "EngineConfig":
    from loopwright.engines.shortcuts import engine_config

    try:
        chosen = engine_config(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    if tokenizer is not None:
        if "tokenizer" not in type(chosen).model_fields:
            raise typer.BadParameter(f"engine {name!r} brings a tokenizer of its own.", param_hint="--tokenizer")
        more = {"tokenizer": tokenizer, **more}
    elif "tokenizer" not in more and (field := type(chosen).model_fields.get("tokenizer")) and field.is_required():
        served = _served_model(getattr(chosen, "url", ""))
        if served is None:
            raise typer.BadParameter(f"say which tokenizer the model behind {name!r} has.", param_hint="--tokenizer")
        more = {"tokenizer": served, **more}
    return checked(type(chosen), {**chosen.model_dump(exclude_unset=True), **more})


def _served_model(url: str) -> str | None:
    """What a server of OpenAI's kind says that it serves, if it is there: its tokenizer has the same name."""
    from contextlib import suppress
    from urllib.request import urlopen

    import orjson

    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        with urlopen(f"{url.rstrip('/')}/v1/models", timeout=10.0) as answer:  # noqa: S310  the config checks the URL
            model = orjson.loads(answer.read(2**20))["data"][0]
        return str(model.get("root") or model["id"])
    return None


def _relay(tokenizer: str | None, given: dict[str, dict[str, Any]]) -> "Engine":
    from loopwright.engines.named_tokenizer import tokenizer_of

    with _gateway_extra():
        from loopwright.gateway.relay.relay import Relay, RelayConfig
    if given["engine"]:
        raise typer.BadParameter("engine.NAME is said to the workers.", param_hint="--set")
    config = checked(RelayConfig, given["fleet"])
    return Relay(config, None if tokenizer is None else tokenizer_of(tokenizer, Path.cwd()), say=say)


@contextmanager
def _gateway_extra() -> Iterator[None]:
    from loopwright.core.errors import MissingExtra

    try:
        yield
    except ImportError as error:
        raise MissingExtra("the gateway", "gateway") from error
