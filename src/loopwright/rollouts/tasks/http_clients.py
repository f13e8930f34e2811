"""HTTP clients for OpenAI's SDK that rollouts share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

_clients: dict[tuple[asyncio.AbstractEventLoop, bool], tuple[Any, int]] = {}
"""HTTP clients and how many rollouts use them, by event loop and whether certificates are checked."""


@asynccontextmanager
async def shared_http_client(*, verify: bool) -> AsyncIterator[Any]:
    """The HTTP client of all rollouts of this event loop that run at the same time; the last one closes it."""
    key = asyncio.get_running_loop(), verify
    client, users = _clients.get(key, (None, 0))
    if client is None:
        # Without certificates, whose loading takes longer than a short rollout, unless they are needed.
        client = import_module("openai").DefaultAsyncHttpxClient(verify=verify)
    _clients[key] = client, users + 1
    try:
        yield client
    finally:
        client, users = _clients.pop(key)
        if users > 1:
            _clients[key] = client, users - 1
        else:
            await client.aclose()
