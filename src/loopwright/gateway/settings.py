"""Settings of gateways and remote loops: the command line overrides the environment, which overrides a file.

| variable | what it sets |
|---|---|
| `REMOTE_<KEY>` | a key of the remote loop, in capitals: `REMOTE_DEADLINE_S=60`, `REMOTE_COMMAND='["mini", "-y"]'` |
| `REMOTE_GATEWAY_<KEY>` | a key of the gateway: `REMOTE_GATEWAY_TYPE=ray`, `REMOTE_GATEWAY_PORT=8400` |
| `REMOTE_GATEWAY_TOKEN` | the token of an external gateway; as a secret it is stored in no file and no ledger |
| `REMOTE_SERVER_TOKEN` | the token of a trial server |
| `PROXY_SERVER_URL` | the URL of an external gateway: `type = "external"` with this `url` |
| `LLM_PROXY_IP` | the address at which agents reach the run's own gateway: its `advertise_host` |

A misspelled name is an error: a near miss of a known variable, and everything unknown below `REMOTE_GATEWAY_` and
`REMOTE_SERVER_`. Other `REMOTE_*` variables, and keys that the run's type of gateway does not have, cause one warning
each. With `LLM_PROXY_IP` alone, the gateway listens at all addresses.

Values are JSON or text. They are read once, where the run is started, and become part of its configuration.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

LOOP, GATEWAY = "REMOTE_", "REMOTE_GATEWAY_"
TOKEN = "REMOTE_GATEWAY_TOKEN"  # noqa: S105  the name of a variable
SERVER_TOKEN = "REMOTE_SERVER_TOKEN"  # noqa: S105  the name of a variable
PROXY_URL, PROXY_HOST = "PROXY_SERVER_URL", "LLM_PROXY_IP"
MIN_TOKEN_LENGTH = 16
_JSON_STARTS = ("{", "[", '"')
_NEAR_MISS = 0.8
"""How similar to a known name a variable must be to count as misspelled."""
_NEAR_MISS_OF_PROXY = 0.9
"""The same for names without our prefix: `PROXY_SERVER` may well be somebody else's."""
_warned: set[str] = set()
log = logging.getLogger(__name__)


def read_token(file: Path) -> str:
    """The token in a file; ValueError if it has no valid one."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"{file} contains no token of at least {MIN_TOKEN_LENGTH} characters")
    return token


def parse_value(text: str, model: type[BaseModel], key: str) -> Any:
    """The value of a text for a key. ValueError if it starts like JSON and is invalid."""
    field = model.model_fields.get(key)
    if field is not None and field.annotation in (str, str | None):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if text.lstrip().startswith(_JSON_STARTS):
            raise ValueError(f"is not valid JSON: {error}") from error
        return text


def from_environment(prefix: str, model: type[BaseModel], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The values of a model's keys in the environment. ValueError names the variable that is invalid."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for key in model.model_fields:
        variable = prefix + key.upper()
        if variable in environ:
            try:
                values[key] = parse_value(environ[variable], model, key)
            except ValueError as error:
                raise ValueError(f"environment variable {variable} {error}") from error
    if prefix == GATEWAY and "advertise_host" in model.model_fields and environ.get(PROXY_HOST):
        values.setdefault("advertise_host", environ[PROXY_HOST])
    return values


def check_names(
    environ: Mapping[str, str], loop: type[BaseModel], gateways: Sequence[type[BaseModel]], own: Iterable[str] = ()
) -> None:
    """Refuse variables that were probably meant to set a key, and warn once of other `REMOTE_*` variables.

    ValueError names the variable and the nearest one that exists. `own` are names that the scenario itself uses.
    """
    gateway_keys = {f"{GATEWAY}{key.upper()}" for model in gateways for key in model.model_fields}
    known = {TOKEN, SERVER_TOKEN, *gateway_keys, *(f"{LOOP}{key.upper()}" for key in loop.model_fields)}
    # Without the prefix, what editors and web servers set (REMOTE_CONTAINERS, REMOTE_ADDR) resembles no key.
    tails = {other.removeprefix(LOOP): other for other in sorted(known)}
    for name in sorted(environ.keys() - known - {PROXY_URL, PROXY_HOST} - set(own)):
        if name.startswith(LOOP):
            is_ours = name.startswith((GATEWAY, SERVER_TOKEN.removesuffix("TOKEN")))
            nearest = get_close_matches(name.removeprefix(LOOP), tails, n=1, cutoff=0.0 if is_ours else _NEAR_MISS)
        else:
            nearest = get_close_matches(name, (PROXY_URL, PROXY_HOST), n=1, cutoff=_NEAR_MISS_OF_PROXY)
        if nearest:
            raise ValueError(
                f"environment variable {name} sets nothing. Did you mean {tails.get(nearest[0], nearest[0])}? "
                "Unset it, or list it in `pass_env` if agents need it"
            )
        if name.startswith(LOOP):
            warn_once(name, "sets nothing of a remote loop")


def warn_once(name: str, problem: str) -> None:
    """Log what is wrong with an environment variable, unless that was done before."""
    if name not in _warned:
        _warned.add(name)
        log.warning("environment variable %s %s", name, problem)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
