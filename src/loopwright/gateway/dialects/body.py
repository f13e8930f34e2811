"""Request bodies: an agent sends its whole conversation in every turn, and only what is new of it is parsed.

A body that starts with the bytes of an earlier one, up to the end of a message, is parsed from there. Equal bytes mean
the same only at the same place, so they are compared from the first byte up to the end of an object in the list of
messages, and what follows must be valid JSON there. Everything else is parsed completely. No JSON library can resume
parsing in the middle of a document, hence the scanning for the end of a message is done here.
"""

import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from loopwright.gateway.dialects.fields import BadRequest

_MAX_PREFIXES, _MAX_BYTES = 4, 2**22
"""Conversations of a session that are remembered by their bytes, and how many bytes each may have."""
_LISTS = (b'"messages"', b'"input"')
"""The dialects' names for the list that grows."""
_SPACE = b" \t\r\n"
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"|[][{}]', re.DOTALL)
_FLAT = re.compile(rb'(?:[ \t\r\n,]*+\{(?:[^][{}"]++|"(?:[^"\\]+|\\.)*+")*+\})*+(?=[ \t\r\n]*+\])', re.DOTALL)
"""Messages without inner lists or objects, as most are, up to the end of their list."""
_LIST_START = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
# A name that no request can contain, because it is random.
_REST = secrets.token_hex(16)
_OPEN = b'{"%b":[' % _REST.encode()


def parse_object(body: bytes, *, allow_empty: bool = False) -> dict[str, Any]:
    """The JSON object in the body of a request; {} if the body is empty and may be."""
    if allow_empty and not body.strip():
        return {}
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is not a JSON object")
    return data


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """The start of a body: its bytes up to the end of a message, and what they contain."""

    data: bytes
    digest: blake2b
    fields: dict[str, Any]
    name: str
    items: list[Any]

    def parse(self, body: bytes) -> dict[str, Any] | None:
        """A body that starts like this; None if it has to be parsed completely."""
        rest = body[len(self.data) :].lstrip(_SPACE)
        comma = bool(self.items) and rest.startswith(b",")
        try:
            fields = orjson.loads(_OPEN + rest[comma:])
        except orjson.JSONDecodeError:
            return None  # the error must name its position in the whole body
        items = fields.pop(_REST)
        # A comma at the end of the list, none between messages, or a second list that would replace this one.
        if (self.items and comma != bool(items)) or self.name in fields:
            return None
        return {**self.fields, self.name: [*self.items, *items], **fields}


class BodyReader:
    """Parses the bodies of one session in one dialect. They share their content, so nobody may change it."""

    def __init__(self, dialect: str) -> None:
        self._new_digest = blake2b(digest_size=16, person=dialect.encode()[:16])
        self._prefixes: list[_Prefix] = []

    def read(self, body: bytes) -> tuple[dict[str, Any], bytes]:
        """The content of a body, and a digest of its bytes. BadRequest if it is not a JSON object."""
        for prefix in self._prefixes:
            if body.startswith(prefix.data) and (data := prefix.parse(body)) is not None:
                return data, self._remember(prefix, body, data[prefix.name])
        # Before its tokens are scanned: the search for the end of an unterminated string would take forever.
        data = parse_object(body)
        first = self._up_to_messages(body)
        if first is not None and first.parse(body) is not None:
            return data, self._remember(first, body, data[first.name])
        digest = self._new_digest.copy()
        digest.update(body)
        return data, digest.digest()

    def _up_to_messages(self, body: bytes) -> _Prefix | None:
        """The start of a body, up to its first message."""
        if len(body) > _MAX_BYTES or (start := _find_list(body)) is None:
            return None
        name, at = start
        fields, digest = orjson.loads(body[:at] + b"]}"), self._new_digest.copy()
        del fields[name]
        digest.update(body[:at])
        return _Prefix(body[:at], digest, fields, name, [])

    def _remember(self, prefix: _Prefix, body: bytes, items: list[Any]) -> bytes:
        """The digest of a body. The body up to its last message replaces its prefix, for the next request."""
        start, digest = len(prefix.data), prefix.digest.copy()
        if (end := _find_end(body, start)) is not None and start < end <= _MAX_BYTES:
            digest.update(body[start:end])
            others = [each for each in self._prefixes if each is not prefix]
            new = _Prefix(body[:end], digest.copy(), prefix.fields, prefix.name, items)
            self._prefixes = [new, *others[: _MAX_PREFIXES - 1]]
            start = end
        digest.update(body[start:])
        return digest.digest()


def _find_list(body: bytes) -> tuple[str, int] | None:
    """The name of the list of messages, and where it starts."""
    depth = 0
    for token in _TOKEN.finditer(body):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case name if depth == 1 and name in _LISTS and (start := _LIST_START.match(body, token.end())):
                return name[1:-1].decode(), start.end()
    return None


def _find_end(body: bytes, start: int) -> int | None:
    """Where the last message of a list ends, from a position between messages; None if it is not an object."""
    if (flat := _FLAT.match(body, start)) is not None:
        return flat.end()
    depth, end = 0, start
    for token in _TOKEN.finditer(body, start):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"]" if depth == 0:
                return end if not body[end : token.start()].strip(_SPACE) else None
            case b"}" | b"]" as bracket:
                depth -= 1
                if depth == 0 and bracket == b"}":
                    end = token.end()
    return None
