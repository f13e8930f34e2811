"""Metrics: numbers read from what a command printed or wrote, or from what it used."""

import json
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config


class MetricMissing(Exception):
    """A metric that is not there; the message says where it was looked for."""


class MetricConfig(Config):
    """Where one metric is found: by `regex` or `json` in the output or in `file`, or in the `resource` usage."""

    regex: str | None = None
    """A pattern whose first group is the number; the last match counts."""
    json_pointer: str | None = Field(default=None, alias="json", pattern=r"^(/.*)?$")
    """A JSON pointer such as `/results/0/gflops` into the output, or into its last line."""
    file: str | None = None
    """A file that the command writes, relative to the trial's directory; without it, standard output is read."""
    resource: Literal["wall_s", "user_s", "system_s", "max_rss_bytes"] | None = None
    """What the trial used instead of what it said."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern.encode()).groups
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
            if groups < 1:
                raise ValueError(f"{pattern!r} needs a group, in parentheses, around the number")
        return pattern

    @field_validator("file")
    @classmethod
    def _inside(cls, name: str | None) -> str | None:
        if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise ValueError(f"{name!r} must be relative to the trial's directory and stay inside it")
        return name

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [way for way in (self.regex, self.json_pointer, self.resource) if way is not None]
        if len(ways) != 1:
            raise ValueError("give exactly one of regex, json, resource")
        if self.resource is not None and self.file is not None:
            raise ValueError("`file` goes with regex or json, not with resource")
        return self

    def read(self, directory: Path, stdout: Path, usage: Mapping[str, float]) -> float:
        """The number, or MetricMissing."""
        if self.resource is not None:
            if self.resource not in usage:
                raise MetricMissing(f"{self.resource} is not known: it lies below that of Loopwright's own process")
            return float(usage[self.resource])
        path = directory / self.file if self.file else stdout
        place = self.file or "stdout"
        if not path.is_file():
            raise MetricMissing(f"the command wrote no {place}")
        text = _last_match(self.regex, path, place) if self.regex else _pointed_at(self.json_pointer or "", path, place)
        try:
            number = float(text)
        except (TypeError, ValueError) as error:
            raise MetricMissing(f"{text!r} in {place} is not a number") from error
        except OverflowError as error:
            raise MetricMissing(f"the number in {place} is not a finite number: {error}") from error
        if not math.isfinite(number):
            raise MetricMissing(f"{text!r} in {place} is not a finite number")
        return number


def _last_match(pattern: str, path: Path, place: str) -> str:
    if path.stat().st_size == 0:
        raise MetricMissing(f"{place} is empty")
    found: bytes | None = None
    # Bytes, mapped: output may be large and need not be valid UTF-8.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in re.finditer(pattern.encode(), content):
            found = match[1]
    if found is None:
        raise MetricMissing(f"nothing in {place} matches {pattern!r}")
    return found.decode(errors="replace")


def _pointed_at(pointer: str, path: Path, place: str) -> Any:
    value = _json_in(path, place)
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MetricMissing(f"the JSON in {place} has no {pointer!r}") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetricMissing(f"{pointer!r} in {place} is {value!r}, not a number")
    return value


def _json_in(path: Path, place: str) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        pass
    # Programs often print their result as one last line of JSON.
    lines = content.rstrip().rsplit(b"\n", 1)
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise MetricMissing(f"{place} is no JSON, and neither is its last line") from error
