"""Command templates: split into words before values are inserted, so that no value is interpreted by a shell."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import orjson

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(?::([A-Za-z]*))?\}")


class CommandTemplate:
    """A command with placeholders for arguments.

    >>> CommandTemplate("gcc {opt:words} bench.c -o bench").words({"opt": "-O3 -march=native"})
    ['gcc', '-O3', '-march=native', 'bench.c', '-o', 'bench']
    """

    def __init__(self, text: str | tuple[str, ...]) -> None:
        self._words = shlex.split(text) if isinstance(text, str) else list(text)
        if not self._words:
            raise ValueError("the command is empty")
        for word in self._words:
            for match in _PLACEHOLDER.finditer(word):
                if match[2] is not None and (match[2] != "words" or match[0] != word):
                    raise ValueError(f"{match[0]} in {word!r}: use {{name}}, or {{name:words}} as a separate word")
        self.names = frozenset(m[1] for word in self._words for m in _PLACEHOLDER.finditer(word) if m[1])

    @property
    def program(self) -> str | None:
        """The program to run; None if it contains a placeholder."""
        first = self._words[0]
        return None if any(m[1] for m in _PLACEHOLDER.finditer(first)) else first

    def option_before(self, name: str) -> str | None:
        """The option before the word `{name}`, which would lose its value if the argument is absent."""
        for option, word in zip(self._words, self._words[1:], strict=False):
            if word in (f"{{{name}}}", f"{{{name}:words}}") and option.startswith("-") and "=" not in option:
                return option
        return None

    def problem_with(self, name: str, value: Any) -> str | None:
        """Why a value cannot be part of a command line; None if it can."""
        text = as_text(value)
        if "\0" in text:
            return f"{value!r} contains a NUL character, which a command line cannot."
        if f"{{{name}:words}}" in self._words:
            try:
                shlex.split(text)
            except ValueError as error:
                return f"{value!r} cannot be split into words: {str(error).lower()}."
        return None

    def words(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words of the command; a word with an absent argument is omitted."""
        words: list[str] = []
        for word in self._words:
            names = {m[1] for m in _PLACEHOLDER.finditer(word) if m[1]}
            if not names <= arguments.keys():
                continue
            whole = _PLACEHOLDER.fullmatch(word)
            if whole and whole[2] == "words":
                words += shlex.split(as_text(arguments[whole[1]]))
            else:
                words.append(_PLACEHOLDER.sub(lambda m: as_text(arguments[m[1]]) if m[1] else m[0][0], word))
        return words


def as_text(value: Any) -> str:
    """A value as it is written on a command line."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
    return orjson.dumps(value).decode()
