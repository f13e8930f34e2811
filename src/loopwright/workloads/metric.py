"""Metrics: numbers from a command's output, from a file it wrote, or from its resource usage."""

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
    """A metric that could not be read; the message says where it was expected."""


class MetricConfig(Config):
    """Where to read one metric: by `regex` or `json` in the output or in `file`, or from the `resource` usage."""

    regex: str | None = None
    """A pattern whose first group is the number; the last match counts."""
    json_pointer: str | None = Field(default=None, alias="json", pattern=r"^(/.*)?$")
    """A JSON pointer such as `/results/0/gflops` into the output, or into its last line."""
    file: str | None = None
    """A file that the command writes, relative to the trial's directory; by default standard output is read."""
    resource: Literal["wall_s", "user_s", "system_s", "max_rss_bytes"] | None = None
    """A resource that the trial used, instead of its output."""

    @field_validator("regex")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern.encode()).groups
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if groups < 1:
                raise ValueError(f"{pattern!r} needs a group, in parentheses, around the number")
        return pattern

    @field_validator("file")
    @classmethod
    def _check_file(cls, name: str | None) -> str | None:
        if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise ValueError(f"{name!r} must be relative to the trial's directory and stay inside it")
        return name

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.regex, self.json_pointer, self.resource)) != 1:
            raise ValueError("give exactly one of regex, json, resource")
        if self.resource is not None and self.file is not None:
            raise ValueError("`file` goes with regex or json, not with resource")
        return self

    def read(self, directory: Path, stdout: Path, usage: Mapping[str, float]) -> float:
        """The value; raises MetricMissing if it cannot be read."""
        if self.resource is not None:
            if self.resource not in usage:
                raise MetricMissing(f"{self.resource} is unknown, since it is below that of Loopwright's own process")
            return float(usage[self.resource])
        path = directory / self.file if self.file else stdout
        source = self.file or "stdout"
        if not path.is_file():
            raise MetricMissing(f"the command did not write {source}")
        pattern, pointer = self.regex, self.json_pointer or ""
        text = _last_match(pattern, path, source) if pattern else _at_pointer(pointer, path, source)
        try:
            number = float(text)
        except (TypeError, ValueError) as error:
            raise MetricMissing(f"{text!r} in {source} is not a number") from error
        except OverflowError as error:
            raise MetricMissing(f"the number in {source} is not a finite number: {error}") from error
        if not math.isfinite(number):
            raise MetricMissing(f"{text!r} in {source} is not a finite number")
        return number


def _last_match(pattern: str, path: Path, source: str) -> str:
    if path.stat().st_size == 0:
        raise MetricMissing(f"{source} is empty")
    number: bytes | None = None
    # Bytes, mapped: output may be large and need not be valid UTF-8.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in re.finditer(pattern.encode(), content):
            number = match[1]
    if number is None:
        raise MetricMissing(f"nothing in {source} matches {pattern!r}")
    return number.decode(errors="replace")


def _at_pointer(pointer: str, path: Path, source: str) -> Any:
    value = _load_json(path, source)
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MetricMissing(f"the JSON in {source} has no {pointer!r}") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetricMissing(f"{pointer!r} in {source} is {value!r}, not a number")
    return value


def _load_json(path: Path, source: str) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        pass
    # Programs often print their result as a last line of JSON.
    lines = content.rstrip().rsplit(b"\n", 1)
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise MetricMissing(f"neither {source} nor its last line is JSON") from error
