"""Bodies of requests: an agent sends its whole conversation in every turn, and only what is new of it is read.

A body that begins with the bytes of an earlier one, up to the end of a message, is read from there on. Bytes that are
the same mean the same only in the same place: so they are compared from the first one on, up to the end of an object in
the list of messages, and what follows must be valid JSON there. Everything else is read as a whole.
"""

import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from loopwright.gateway.dialects.base import BadRequest

_KNOWN, _LARGEST = 4, 2**22
"""Conversations of a session that are known by their bytes, and how many bytes each may have."""
_LISTS = (b'"messages"', b'"input"')
"""What dialects call the list that grows."""
_SPACE = b" \t\r\n"
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"|[][{}]', re.DOTALL)
_FLAT = re.compile(rb'(?:[ \t\r\n,]*+\{(?:[^][{}"]++|"(?:[^"\\]+|\\.)*+")*+\})*+(?=[ \t\r\n]*+\])', re.DOTALL)
"""Messages that hold no lists or objects, as most do, up to the end of their list."""
_LIST = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
# A name that no request can hold, as nobody knows it.
_REST = secrets.token_hex(16)
_OPEN = b'{"%b":[' % _REST.encode()


def parse_object(body: bytes, *, empty: bool = False) -> dict[str, Any]:
    """The JSON object that a request brings; `empty` if it may bring none."""
    if empty and not body.strip():
        return {}
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise BadRequest("the body is no JSON object")
    return read


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """How a body began: its bytes up to the end of a message, and what they say."""

    data: bytes
    hashed: blake2b
    fields: dict[str, Any]
    name: str
    items: list[Any]

    def told(self, body: bytes) -> dict[str, Any] | None:
        """What a body says that begins so; None if that has to be read from the whole of it."""
        rest = body[len(self.data) :].lstrip(_SPACE)
        comma = bool(self.items) and rest.startswith(b",")
        try:
            fields = orjson.loads(_OPEN + rest[comma:])
        except orjson.JSONDecodeError:
            return None  # the error is to name its place in the body
        items = fields.pop(_REST)
        # A comma where the list ends, none between messages, or a second list that would replace this one.
        if (self.items and comma != bool(items)) or self.name in fields:
            return None
        return {**self.fields, self.name: [*self.items, *items], **fields}


class Bodies:
    """The bodies that a session got in one dialect. What they say is shared between them: nobody may change it."""

    def __init__(self, dialect: str) -> None:
        self._new = blake2b(digest_size=16, person=dialect.encode()[:16])
        self._begun: list[_Begun] = []

    def read(self, body: bytes) -> tuple[dict[str, Any], bytes]:
        """What a body says, and a digest that only the same bytes have. BadRequest if it is no JSON object."""
        for begun in self._begun:
            if body.startswith(begun.data) and (told := begun.told(body)) is not None:
                return told, self._digest(begun, body, told[begun.name])
        # Before its tokens are looked at: looking for the end of a string that has none takes forever.
        told = parse_object(body)
        first = self._first(body)
        if first is not None and first.told(body) is not None:
            return told, self._digest(first, body, told[first.name])
        hashed = self._new.copy()
        hashed.update(body)
        return told, hashed.digest()

    def _first(self, body: bytes) -> _Begun | None:
        """How a body begins, up to its first message."""
        if len(body) > _LARGEST or (found := _list(body)) is None:
            return None
        name, at = found
        fields, hashed = orjson.loads(body[:at] + b"]}"), self._new.copy()
        del fields[name]
        hashed.update(body[:at])
        return _Begun(body[:at], hashed, fields, name, [])

    def _digest(self, begun: _Begun, body: bytes, items: list[Any]) -> bytes:
        """The digest of a body. How it goes on up to its last message is kept, for the one after it."""
        start, hashed = len(begun.data), begun.hashed.copy()
        if (end := _end(body, start)) is not None and start < end <= _LARGEST:
            hashed.update(body[start:end])
            kept = [each for each in self._begun if each is not begun]
            self._begun = [_Begun(body[:end], hashed.copy(), begun.fields, begun.name, items), *kept[: _KNOWN - 1]]
            start = end
        hashed.update(body[start:])
        return hashed.digest()


def _list(body: bytes) -> tuple[str, int] | None:
    """What the list of messages is called, and where it begins."""
    depth = 0
    for token in _TOKEN.finditer(body):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case name if depth == 1 and name in _LISTS and (opened := _LIST.match(body, token.end())):
                return name[1:-1].decode(), opened.end()
    return None


def _end(body: bytes, start: int) -> int | None:
    """Where the last message of a list ends, from somewhere between its messages; None if the last one is no object."""
    if (flat := _FLAT.match(body, start)) is not None:
        return flat.end()
    depth, end = 0, start
    for token in _TOKEN.finditer(body, start):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"]" if depth == 0:
                return end if not body[end : token.start()].strip(_SPACE) else None
            case b"}" | b"]" as closed:
                depth -= 1
                if depth == 0 and closed == b"}":
                    end = token.end()
    return None
