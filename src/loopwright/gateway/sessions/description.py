"""What the owner of a session reads: the graph, rows for training, a verdict per turn, and a snapshot id.

Each branch is a row with all of its tokens, so a session with many branches has rows that are far larger than what it
recorded. They are never in memory together: a large description is written in pieces, off the event loop.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from loopwright.core.episode import Episode, Row
from loopwright.gateway.sessions.call import CallRecord
from loopwright.gateway.sessions.exactness import Exactness, Verdict

_ROW_FIELDS = ("prompt_ids", "response_ids", "response_mask", "logprobs", "versions", "nodes")
_RECORD_FIELDS = ("dialect", "branch", "ignored")
_NO_RECORD = CallRecord()
_MAX_SMALL = 20_000
"""Tokens of a description that the event loop writes at once: a few milliseconds."""
_PIECE_BYTES = 2**18
_SLICE = 2**16
"""Numbers that are written at once: the interpreter is not available to others meanwhile."""


def snapshot_of(data: Mapping[str, Any]) -> str:
    """The snapshot id of a session, from the response of `GET /sessions/{id}`.

    It covers the graph (messages, ids, logprobs, versions) and the verdicts, but no durations. Anyone can verify it:

        data = httpx.get(f"{url}/sessions/{id}", headers=…).json()
        assert snapshot_of(data) == data["snapshot"]
    """
    return _snapshot_of(iter(data["episode"]["nodes"]), data["turns"])


def _snapshot_of(nodes: Iterator[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> str:
    """The hash of the JSON object of both, with sorted keys; the nodes are written one by one."""
    digest, separator = blake2b(b'{"nodes":[', digest_size=16), b""
    for node in nodes:
        digest.update(separator + orjson.dumps(node, option=orjson.OPT_SORT_KEYS))
        separator = b","
    verdicts = [{name: turn[name] for name in ("node", "verdict", "reason", "token")} for turn in turns]
    digest.update(b'],"turns":%b}' % orjson.dumps(verdicts, option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


class SessionDescription:
    """A session as it was when this was made, so that another thread can write it.

    `status` has the fields that precede the record.
    """

    def __init__(
        self,
        status: Mapping[str, Any],
        episode: Episode,
        verdicts: Mapping[int, Verdict],
        records: Mapping[int, CallRecord],
    ) -> None:
        self._status, self._episode, self._verdicts, self._records = status, episode, verdicts, records

    @property
    def is_small(self) -> bool:
        """Whether its nodes and rows can be written at once."""
        nodes = self._episode.nodes
        lengths, total = [0] * len(nodes), 0
        parents = {node.parent for node in nodes}
        for index, node in enumerate(nodes):
            lengths[index] = len(node.ids) + lengths[node.parent or 0]
            total += len(node.ids) + (0 if index in parents else lengths[index])
        return total <= _MAX_SMALL and len(nodes) <= _MAX_SMALL // 20

    async def snapshot(self) -> str:
        """The snapshot id."""
        return self._snapshot() if self.is_small else await asyncio.to_thread(self._snapshot)

    def _snapshot(self) -> str:
        return _snapshot_of((node.as_json() for node in self._episode.nodes[1:]), self._turns())

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        turns = {turn["node"]: turn for turn in self._turns()}
        rows = [_row_fields(row, turns) for row in self._episode.iter_rows()]
        return {**self._head(), "turns": list(turns.values()), "rows": rows, "episode": self._episode.as_json()}

    def pieces(self) -> Iterator[bytes]:
        """The same as JSON, piece by piece."""
        buffer = bytearray()
        for part in self._parts():
            buffer += part
            if len(buffer) >= _PIECE_BYTES:
                yield bytes(buffer)
                buffer.clear()
        yield bytes(buffer)

    def _parts(self) -> Iterator[bytes]:
        turns = {turn["node"]: turn for turn in self._turns()}
        yield orjson.dumps(self._head())[:-1] + b',"turns":%b,"rows":[' % orjson.dumps([*turns.values()])
        separator = b""
        for row in self._episode.iter_rows():
            yield separator
            yield from _object_parts(_row_fields(row, turns))
            separator = b","
        # The nodes are at the end of an episode.
        yield b'],"episode":' + orjson.dumps(self._episode.as_json(with_nodes=False)).removesuffix(b"]}")
        separator = b""
        for node in self._episode.nodes[1:]:
            yield separator
            yield from _object_parts(node.as_json())
            separator = b","
        yield b"]}}"

    def _head(self) -> dict[str, Any]:
        counts = dict.fromkeys(map(str, Exactness), 0)
        for verdict in self._verdicts.values():
            counts[str(verdict.kind)] += 1
        is_trainable = not counts[Exactness.BROKEN] and not self._status["running"] and self._episode.sampled > 0
        return {**self._status, "trainable": is_trainable, "verdicts": counts}

    def _turns(self) -> list[dict[str, Any]]:
        nodes, abandoned = self._episode.nodes, self._episode.abandoned
        return [
            {
                "node": number,
                **{name: getattr(self._records.get(number, _NO_RECORD), name) for name in _RECORD_FIELDS},
                "verdict": verdict.kind,
                "reason": verdict.reason,
                "token": verdict.token,
                "finish": nodes[number].finish,
                "abandoned": number in abandoned,
                "sampling": nodes[number].sampling,
                "sampled_tokens": nodes[number].sampled,
            }
            for number, verdict in sorted(self._verdicts.items())
        ]


def _row_fields(row: Row, turns: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in _ROW_FIELDS}
    return {**fields, "turns": [turns[number] for number in row.nodes if number in turns]}


def _object_parts(data: Mapping[str, Any]) -> Iterator[bytes]:
    """A JSON object; long lists of numbers are written in slices."""
    start = b"{"
    for name, value in data.items():
        yield start + orjson.dumps(name) + b":"
        start = b","
        if isinstance(value, tuple) and len(value) > _SLICE:
            for at in range(0, len(value), _SLICE):
                yield (b"," if at else b"[") + orjson.dumps(value[at : at + _SLICE])[1:-1]
            yield b"]"
        else:
            yield orjson.dumps(value)
    yield b"}"
