"""HTTP clients for OpenAI's SDK that rollouts share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MAX_USERS = 8
"""Rollouts per client: each request examines every connection of its client."""


@dataclass(slots=True)
class _SharedClient:
    client: Any
    users: int = 0


_clients: dict[tuple[asyncio.AbstractEventLoop, bool], list[_SharedClient]] = {}
"""By event loop and whether certificates are checked."""


@asynccontextmanager
async def shared_http_client(*, verify: bool) -> AsyncIterator[Any]:
    """An HTTP client that some rollouts of this event loop share; the last of them closes it."""
    key = asyncio.get_running_loop(), verify
    clients = _clients.setdefault(key, [])
    shared = next((each for each in clients if each.users < _MAX_USERS), None)
    if shared is None:
        # Without certificates, whose loading takes longer than a short rollout, unless they are needed.
        shared = _SharedClient(import_module("openai").DefaultAsyncHttpxClient(verify=verify))
        clients.append(shared)
    shared.users += 1
    try:
        yield shared.client
    finally:
        shared.users -= 1
        if not shared.users:
            clients.remove(shared)
            if not clients:
                _clients.pop(key, None)
            await shared.client.aclose()
