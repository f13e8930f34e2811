"""Tool calls: how model families write them, and a scanner for calls that arrive a few characters at a time.

A call is a JSON object with a name and arguments. Arguments are streamed while they are sampled, and text that was sent
cannot be taken back. The scanner therefore releases only text that a valid JSON object can continue; numbers, words and
escapes wait until they are complete. It is written by hand because JSON libraries parse complete documents only.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

Tool = Mapping[str, Any]
"""A tool as OpenAI describes it: {"type": "function", "function": {"name", "description", "parameters"}}."""

_ARGUMENTS = ("arguments", "parameters")
_MAX_DEPTH = 64
"""Arguments that are nested deeper are malformed: clients differ in how deep they can parse."""
_MAX_NUMBER = 4000
"""Characters of a number; longer ones are malformed."""
_LONG_WORD = re.compile(rf"(?<![-+.\w])[-+.\w]{{{_MAX_NUMBER + 1}}}")
"""It may be a number that is too long."""
_MAX_NAME = 512
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){0,512}+"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|u[dD][89abAB][0-9a-fA-F]{2}\\(?:u[0-9a-fA-F]{0,4})?)?")
"""What may still become an escape. Half a surrogate pair is not valid text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """How a model family marks its calls."""

    open: str = ""
    """The mark before a call; empty if the family has none."""
    close: str = ""
    """The mark after a call; empty if a call ends with its object."""
    bare: bool = False
    """Whether a message may start with the object of a call, without a mark."""
    arguments: str = "arguments"
    """The family's key for arguments; the parser accepts either key."""

    def opening(self, name: str | None) -> str:
        """The text that only a call can follow: a call of this function, or of any function."""
        text = f'{self.open}{chr(10) if self.close else ""}{{"name": '
        return f'{text}"' if name is None else f'{text}{json.dumps(name)}, "{self.arguments}": '

    def write(self, name: str, arguments: Any) -> str:
        """A call as it appears in a message."""
        body = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.open}\n{body}\n{self.close}" if self.close else f"{self.open}{body}"


HERMES = Grammar("<tool_call>", "</tool_call>")
"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
LLAMA3 = Grammar("<|python_tag|>", bare=True, arguments="parameters")
"""Llama 3: `<|python_tag|>{"name": …, "parameters": {…}}`, or the object alone; `;` separates several calls."""
JSON = Grammar(bare=True)
"""No marks: a message that starts with `{"name": …, "arguments": {…}}`."""


class _InvalidJsonError(Exception):
    """The text is not a JSON object."""


class ObjectScanner:
    """Scans a JSON object that arrives a few characters at a time."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected = "value"
        self.pending = ""
        """Text that cannot be released before more of it arrives."""
        self.complete = self.invalid = False
        self.rest = ""
        """Text after the end of the object, or from where it is invalid."""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._stack)

    def scan(self, text: str, depth: int = 0) -> str:
        """Add text; return what is certain by now, up to where the object closes to this depth."""
        text, at = self.pending + text, 0
        self.pending = self.rest = ""
        try:
            while at < len(text):
                end = self._next(text, at)
                if end is None:
                    self.pending = text[at:]
                    break
                at = end
                if self.depth <= depth and text[at - 1] in "}]":
                    self.complete = not self._stack
                    self.rest = text[at:]
                    break
        except _InvalidJsonError:
            self.invalid, self.rest = True, text[at:]
        return text[:at]

    def _next(self, text: str, at: int) -> int | None:
        """Where the next element ends; None if more text must arrive first."""
        if self._expected in ("key text", "value text"):
            return self._in_string(text, at)
        character = text[at]
        if character in " \t\n\r":
            return _end(_SPACE, text, at)
        if character == '"' and self._expected in ("key", "key or end", "value", "value or end"):
            self._expected = "key text" if "key" in self._expected else "value text"
            return at + 1
        may_close = self._expected in ("more", "key or end", "value or end")
        if may_close and self._stack and character == self._stack[-1]:
            self._stack.pop()
            self._expected = "more"
            return at + 1
        if character == "," and self._expected == "more":
            self._expected = "key" if self._stack[-1] == "}" else "value"
            return at + 1
        if character == ":" and self._expected == "colon":
            self._expected = "value"
            return at + 1
        if self._expected not in ("value", "value or end") or not (self._stack or character == "{"):
            raise _InvalidJsonError
        if character in "{[":
            if self.depth == _MAX_DEPTH:
                raise _InvalidJsonError
            self._stack.append("}" if character == "{" else "]")
            self._expected = "key or end" if character == "{" else "value or end"
            return at + 1
        return self._scalar(text, at)

    def _in_string(self, text: str, at: int) -> int | None:
        if (end := _end(_PLAIN, text, at)) > at:
            return end
        if text[at] == '"':
            self._expected = "colon" if self._expected == "key text" else "more"
            return at + 1
        if text[at] != "\\":
            raise _InvalidJsonError
        if match := _ESCAPE.match(text, at):
            return match.end()
        if _PARTIAL_ESCAPE.fullmatch(text, at):
            return None
        raise _InvalidJsonError

    def _scalar(self, text: str, at: int) -> int | None:
        end = _end(_SCALAR, text, at)
        word = text[at:end]
        if len(word) > _MAX_NUMBER or not word:
            raise _InvalidJsonError
        if end == len(text):
            return None
        if word not in ("true", "false", "null") and not (_NUMBER.fullmatch(word) and math.isfinite(float(word))):
            raise _InvalidJsonError
        self._expected = "more"
        return end


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


@dataclass(frozen=True, slots=True)
class CallHead:
    """The start of a call: its name, and where its arguments start."""

    name: str
    at: int


def find_head(text: str) -> CallHead | bool:
    """The start of a call; True while it may still arrive, False if the object is not a call.

    Also True for a call whose arguments precede its name: it can be parsed only once it is complete.
    """
    at, name = _end(_SPACE, text, 0), None
    if at == len(text):
        return True
    if text[at] != "{":
        return False
    at += 1
    while True:
        at = _end(_SPACE, text, at)
        key = _string(text, at)
        if isinstance(key, bool):
            return key
        at = _end(_SPACE, text, at + len(key))
        if at == len(text):
            return True
        if text[at] != ":":
            return False
        at = _end(_SPACE, text, at + 1)
        if at == len(text):
            return True
        if key[1:-1] in _ARGUMENTS:
            if text[at] != "{":
                return False
            return CallHead(name, at) if name is not None else True
        if key not in ('"name"', '"type"', '"id"'):
            return False
        value = _string(text, at)
        if isinstance(value, bool):
            return value
        if key == '"name"' and (name := _decode(value)) is None:
            return False
        at = _end(_SPACE, text, at + len(value))
        if at == len(text):
            return True
        if text[at] != ",":
            return text[at] == "}" and name is not None
        at += 1


def _string(text: str, at: int) -> str | bool:
    """The string that starts here; True if its end may still arrive, False if no string starts here."""
    if at == len(text):
        return True
    if match := _STRING.match(text, at):
        return match[0] if len(match[0]) <= _MAX_NAME else False
    rest = text[at : at + _MAX_NAME]
    return rest[0] == '"' and len(rest) < _MAX_NAME and not any(character < " " for character in rest)


def _decode(string: str) -> str | None:
    try:
        name = str(json.loads(string))
        name.encode()  # half a surrogate pair is not valid text
    except ValueError:
        return None
    return name


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call; None if the text is not a call.

    Not with orjson, which rounds integers of more than 64 bits.
    """
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments: Any = next((call[key] for key in _ARGUMENTS if key in call), {})
        if not isinstance(arguments, dict):
            return None
        arguments_json = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + arguments_json).encode()
    except (ValueError, RecursionError):
        return None
    return (call["name"], arguments_json) if is_json_object(arguments_json) else None


def is_json_object(text: str) -> bool:
    """Whether this is a JSON object that every client can parse: not too deep, and with finite numbers."""
    text = text.strip()
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        if text.isascii():
            return False
    else:
        if not _LONG_WORD.search(text):
            return isinstance(value, dict) and not _is_deep(value)
    scanner = ObjectScanner()  # which takes a hundred times as long
    scanner.scan(text)
    return scanner.complete and not scanner.rest


def _is_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        inner = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return depth > _MAX_DEPTH
