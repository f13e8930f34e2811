"""How families write tool calls, and a reader of calls that come a few characters at a time.

A call is a JSON object with a name and arguments. Arguments are told as they are sampled, and what was told must
stay true: only text with which a JSON object can go on is told, and numbers, words and escapes once they are whole.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_DEEPEST = 64
"""Arguments that are nested deeper than this are none: clients differ in what they can read."""
_LONGEST = 4000
"""Characters of a number; longer ones are none."""
_LONGEST_NAME = 512
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){0,512}+"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_HALF = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|u[dD][89abAB][0-9a-fA-F]{2}\\(?:u[0-9a-fA-F]{0,4})?)?")
"""What may yet become an escape: half a surrogate pair is no text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """How a family marks its calls."""

    open: str = ""
    """What stands before a call; empty where calls are never marked."""
    close: str = ""
    """What stands after a call; empty where it ends with its object."""
    bare: bool = False
    """Whether a message may begin with the object of a call, unmarked."""
    arguments: str = "arguments"
    """What the family calls them; either name is read."""

    def opening(self, name: str | None) -> str:
        """The text after which only a call can follow: of this function, or of any."""
        begun = f'{self.open}{chr(10) if self.close else ""}{{"name": '
        return f'{begun}"' if name is None else f'{begun}{json.dumps(name)}, "{self.arguments}": '

    def written(self, name: str, arguments: Any) -> str:
        """A call as a given message has it."""
        body = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.open}\n{body}\n{self.close}" if self.close else f"{self.open}{body}"


HERMES = Grammar("<tool_call>", "</tool_call>")
"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
LLAMA3 = Grammar("<|python_tag|>", bare=True, arguments="parameters")
"""Llama 3: `<|python_tag|>{"name": …, "parameters": {…}}`, or the object alone; several with `;` between them."""
JSON = Grammar(bare=True)
"""No marks: a message that begins with `{"name": …, "arguments": {…}}`."""


class Broken(Exception):
    """The text is no JSON object."""


class Object:
    """A JSON object that comes a few characters at a time."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected = "value"
        self._pending = ""  # what cannot be told before more of it is there
        self.ended = self.broken = False
        self.rest = ""
        """What is left over once it has ended or broken."""

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._stack)

    def take(self, text: str, depth: int = 0) -> str:
        """The text of it that is certain by now, up to where it closes to this depth; `rest` is what lies beyond."""
        text, at = self._pending + text, 0
        self._pending = self.rest = ""
        try:
            while at < len(text):
                end = self._next(text, at)
                if end is None:
                    self._pending = text[at:]
                    break
                at = end
                if self.depth <= depth and text[at - 1] in "}]":
                    self.ended = not self._stack
                    self.rest = text[at:]
                    break
        except Broken:
            self.broken, self.rest = True, text[at:]
        return text[:at]

    def _next(self, text: str, at: int) -> int | None:
        """Where the next bit ends; None if there must be more of it first."""
        if self._expected in ("key text", "value text"):
            return self._in_string(text, at)
        character = text[at]
        if character in " \t\n\r":
            return _end(_SPACE, text, at)
        if character == '"' and self._expected in ("key", "key or end", "value", "value or end"):
            self._expected = "key text" if "key" in self._expected else "value text"
            return at + 1
        if character in "}]" and self._closes(character):
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
            raise Broken
        if character in "{[":
            if self.depth == _DEEPEST:
                raise Broken
            self._stack.append("}" if character == "{" else "]")
            self._expected = "key or end" if character == "{" else "value or end"
            return at + 1
        return self._scalar(text, at)

    def _closes(self, character: str) -> bool:
        if not self._stack or character != self._stack[-1]:
            return False
        return self._expected in ("more", "key or end", "value or end")

    def _in_string(self, text: str, at: int) -> int | None:
        if (end := _end(_PLAIN, text, at)) > at:
            return end
        if text[at] == '"':
            self._expected = "colon" if self._expected == "key text" else "more"
            return at + 1
        if text[at] != "\\":
            raise Broken
        if match := _ESCAPE.match(text, at):
            return match.end()
        if _HALF.fullmatch(text, at):
            return None
        raise Broken

    def _scalar(self, text: str, at: int) -> int | None:
        end = _end(_SCALAR, text, at)
        word = text[at:end]
        if len(word) > _LONGEST or not word:
            raise Broken
        if end == len(text):
            return None
        if word not in ("true", "false", "null") and not (_NUMBER.fullmatch(word) and math.isfinite(float(word))):
            raise Broken
        self._expected = "more"
        return end


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call: its name, and where its arguments begin."""

    name: str
    at: int


def head(text: str) -> Head | bool:
    """The beginning of a call, once it is there; True as long as it may yet come, False if this is another object.

    A call whose arguments stand before its name is told once it is whole, which is True too.
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
            return Head(name, at) if name is not None else True
        if key not in ('"name"', '"type"', '"id"'):
            return False
        value = _string(text, at)
        if isinstance(value, bool):
            return value
        if key == '"name"' and (name := _text(value)) is None:
            return False
        at = _end(_SPACE, text, at + len(value))
        if at == len(text):
            return True
        if text[at] != ",":
            return text[at] == "}" and name is not None
        at += 1


def _string(text: str, at: int) -> str | bool:
    """The string that stands here; True if it may yet end, False if none begins here."""
    if at == len(text):
        return True
    if match := _STRING.match(text, at):
        return match[0] if len(match[0]) <= _LONGEST_NAME else False
    rest = text[at : at + _LONGEST_NAME]
    return rest[0] == '"' and len(rest) < _LONGEST_NAME and not any(character < " " for character in rest)


def _text(string: str) -> str | None:
    try:
        read = str(json.loads(string))
        read.encode()  # half a surrogate pair is no text
    except ValueError:
        return None
    return read


def whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, if this is one. Not by orjson, which rounds integers of more than 64 bits."""
    try:
        read = json.loads(text)
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return None
        arguments: Any = next((read[key] for key in _ARGUMENTS if key in read), {})
        if not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (read["name"] + written).encode()
    except (ValueError, RecursionError):
        return None
    return (read["name"], written) if is_object(written) else None


def is_object(text: str) -> bool:
    """Whether this is a JSON object that everybody can read: neither too deep nor beyond all numbers."""
    scanned = Object()
    scanned.take(text.strip())
    return scanned.ended and not scanned.rest
