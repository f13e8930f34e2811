"""Settings of gateways and remote loops: the command line over the environment over a file.

| variable | what it sets |
|---|---|
| `REMOTE_<KEY>` | a key of the remote loop, in capitals: `REMOTE_DEADLINE_S=60`, `REMOTE_COMMAND='["mini", "-y"]'` |
| `REMOTE_GATEWAY_<KEY>` | a key of the gateway: `REMOTE_GATEWAY_TYPE=ray`, `REMOTE_GATEWAY_PORT=8400` |
| `REMOTE_GATEWAY_TOKEN` | the token of an external gateway; as a secret it is in no file and no ledger |
| `REMOTE_SERVER_TOKEN` | the token of a trial server |
| `PROXY_SERVER_URL` | the URL of an external gateway: `type = "external"` with this `url` |
| `LLM_PROXY_IP` | the address at which agents reach our own gateway: its `advertise_host` |

Values are JSON, or text. They are read once, where the run is started, and travel from there in its configuration.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

LOOP, GATEWAY = "REMOTE_", "REMOTE_GATEWAY_"
TOKEN = "REMOTE_GATEWAY_TOKEN"  # noqa: S105  the name of a variable
SERVER_TOKEN = "REMOTE_SERVER_TOKEN"  # noqa: S105  the name of a variable
LEAST_TOKEN = 16
_BEGINS = ("{", "[", '"')


def token_in(file: Path) -> str:
    """The token that a file holds; ValueError if it holds none."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if len(token) < LEAST_TOKEN:
        raise ValueError(f"{file} holds no token of {LEAST_TOKEN} characters or more")
    return token


def value_of(text: str, model: type[BaseModel], key: str) -> Any:
    """What a text means for a key. ValueError if it begins like JSON and is none."""
    field = model.model_fields.get(key)
    if field is not None and field.annotation in (str, str | None):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if text.lstrip().startswith(_BEGINS):
            raise ValueError(f"is broken JSON: {error}") from error
        return text


def from_environment(prefix: str, model: type[BaseModel], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment says of a model's keys. ValueError names the variable that cannot be read."""
    environ = os.environ if environ is None else environ
    found = {}
    for key in model.model_fields:
        variable = prefix + key.upper()
        if variable in environ:
            try:
                found[key] = value_of(environ[variable], model, key)
            except ValueError as error:
                raise ValueError(f"environment variable {variable} {error}") from error
    if prefix == GATEWAY and "advertise_host" in model.model_fields and environ.get("LLM_PROXY_IP"):
        found.setdefault("advertise_host", environ["LLM_PROXY_IP"])
    return found
