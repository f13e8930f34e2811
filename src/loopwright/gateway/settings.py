"""Settings of gateways and remote loops: the command line overrides the environment, which overrides a file.

| variable | what it sets |
|---|---|
| `REMOTE_<KEY>` | a key of the remote loop, in capitals: `REMOTE_DEADLINE_S=60`, `REMOTE_COMMAND='["mini", "-y"]'` |
| `REMOTE_GATEWAY_<KEY>` | a key of the gateway: `REMOTE_GATEWAY_TYPE=ray`, `REMOTE_GATEWAY_PORT=8400` |
| `REMOTE_GATEWAY_TOKEN` | the token of an external gateway; as a secret it is stored in no file and no ledger |
| `REMOTE_SERVER_TOKEN` | the token of a trial server |
| `PROXY_SERVER_URL` | the URL of an external gateway: `type = "external"` with this `url` |
| `LLM_PROXY_IP` | the address at which agents reach the run's own gateway: its `advertise_host` |

Values are JSON or text. They are read once, where the run is started, and become part of its configuration.
"""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

LOOP, GATEWAY = "REMOTE_", "REMOTE_GATEWAY_"
TOKEN = "REMOTE_GATEWAY_TOKEN"  # noqa: S105  the name of a variable
SERVER_TOKEN = "REMOTE_SERVER_TOKEN"  # noqa: S105  the name of a variable
MIN_TOKEN_LENGTH = 16
_JSON_STARTS = ("{", "[", '"')


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
    if prefix == GATEWAY and "advertise_host" in model.model_fields and environ.get("LLM_PROXY_IP"):
        values.setdefault("advertise_host", environ["LLM_PROXY_IP"])
    return values


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
