"""The rewards that a task's tests wrote: named finite numbers, or the tests are broken."""

import math
import os
import stat
from pathlib import Path
from typing import Any

import orjson

_MAX_BYTES = 2**16
_MAX_PARTS = 64


class BrokenTests(Exception):
    """The tests left no valid reward. Where they are run, this becomes the `error` of their results."""


def read_rewards(directory: Path) -> dict[str, float]:
    """The rewards in reward.json or reward.txt. Of both, the lower counts: code under test may have written one."""
    parts, number, errors = None, None, list[BrokenTests]()
    try:
        parts = _parse_json(directory / "reward.json")
    except BrokenTests as error:
        errors.append(error)
    try:
        number = _parse_text(directory / "reward.txt")
    except BrokenTests as error:
        errors.append(error)
    if parts is None:
        if number is None:
            raise errors[0] if errors else BrokenTests("left neither reward.json nor reward.txt")
        return {"reward": number}
    total = parts["reward"] if "reward" in parts else math.fsum(parts.values())
    return parts if number is None or total <= number else {**parts, "reward": number}


def _parse_text(file: Path) -> float | None:
    data = _read(file)
    if data is None:
        return None
    try:
        return _finite(float(data.decode()), "reward.txt")
    except ValueError as error:
        raise BrokenTests(f"left a reward.txt that is not a number: {data[:80]!r}") from error


def _parse_json(file: Path) -> dict[str, float] | None:
    data = _read(file)
    if data is None:
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BrokenTests(f"left a reward.json that is not JSON: {error}") from error
    if not isinstance(value, dict) or not value or len(value) > _MAX_PARTS:
        raise BrokenTests(f"left a reward.json without named numbers: {data[:80]!r}")
    return {name: _finite(number, f"reward.json, {name}") for name, number in value.items()}


def _finite(number: Any, where: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise BrokenTests(f"left a reward that is not a finite number: {where} is {number!r}")
    return float(number)


def _read(file: Path) -> bytes | None:
    """A small regular file; code under test may have put a pipe or a link in its place."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokenTests(f"left a reward that cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BrokenTests(f"left a {file.name} that is not a regular file")
        data = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise BrokenTests(f"left a {file.name} that is too large for a reward")
    return data
