"""Snapshots: an id of exactly what was recorded of a session, which anybody can work out from what is shown of it.

    data = httpx.get(f"{url}/sessions/{id}", headers=…).json()
    assert snapshot_of(data) == data["snapshot"]

It is of the graph (messages, ids, logprobs, versions) and of the verdicts. How long things took is none of it.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson


def snapshot_of(data: Mapping[str, Any]) -> str:
    """The snapshot id of a session, from what `GET /sessions/{id}` tells of it."""
    turns = [{name: turn[name] for name in ("node", "verdict", "reason", "token")} for turn in data["turns"]]
    recorded = {"nodes": data["episode"]["nodes"], "turns": turns}
    return blake2b(orjson.dumps(recorded, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
