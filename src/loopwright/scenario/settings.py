"""What the environment and the command line say of a run's remote loop and gateway, laid over its table."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.core.errors import did_you_mean
from loopwright.gateway.settings import GATEWAY, LOOP, from_environment, value_of
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import GATEWAY_HOSTS

_TABLES = ("loop", "gateway")
_ELSEWHERE = ("external", "server")


def is_remote(run: Mapping[str, Any]) -> bool:
    """Whether a run's loop is a remote one, as far as its table tells."""
    loop = run["rollout"].get("loop") if isinstance(run.get("rollout"), Mapping) else None
    return isinstance(loop, Mapping) and loop.get("type") == "remote"


def resolved(run: Mapping[str, Any], settings: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The table with all that is said elsewhere. ValueError names the variable or the option that is wrong."""
    if not is_remote(run):
        return dict(run)
    loop = {**run["rollout"]["loop"], **from_environment(LOOP, RemoteConfig, environ)}
    gateway = _gateway(run.get("gateway", {}), environ)
    for text in settings:
        table, key, value = _assigned(text, gateway)
        (loop if table == "loop" else gateway)[key] = value
    found = {**run, "rollout": {**run["rollout"], "loop": loop}}
    if not gateway:
        return found
    if gateway.get("type") in _ELSEWHERE and run.get("gateway", {}).get("type") not in _ELSEWHERE:
        found.pop("engine", None)  # it was for the gateway that the file speaks of
    return {**found, "gateway": gateway}


def _gateway(table: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ValueError("[run.gateway] must be a table")
    url = environ.get("PROXY_SERVER_URL")
    kind = environ.get(f"{GATEWAY}TYPE") or ("external" if url else table.get("type", "embedded"))
    model = GATEWAY_HOSTS.get(kind)
    if model is None:  # the loader says which there are
        return dict(table) | {"type": kind}
    # Keys of the kind that the file speaks of have no place in another.
    kept = {key: value for key, value in table.items() if kind == table.get("type", kind) or key in model.model_fields}
    kept |= {"url": url} if url and kind == "external" else {}
    found = kept | from_environment(GATEWAY, model, environ)
    return {**found, "type": kind} if found or kind != "embedded" else {}


def _assigned(text: str, gateway: Mapping[str, Any]) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    table, dot, key = name.partition(".")
    if not equals or not dot or not key or table not in _TABLES:
        raise ValueError(f"--set {text!r}: write loop.KEY=VALUE or gateway.KEY=VALUE. {did_you_mean(table, _TABLES)}")
    model = RemoteConfig if table == "loop" else GATEWAY_HOSTS.get(str(gateway.get("type", "embedded")), RemoteConfig)
    try:
        return table, key, value_of(value, model, key)
    except ValueError as error:
        raise ValueError(f"--set {name} {error}") from error
