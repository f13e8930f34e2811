"""The reward that a task's tests left: named finite numbers, or the tests are broken."""

import math
import os
import stat
from pathlib import Path
from typing import Any

import orjson

_MOST_BYTES = 2**16
_MOST_PARTS = 64


class NoVerdict(Exception):
    """Tests that are broken; says how. It ends where they are run, as an `error` of what they said."""


def rewards_in(directory: Path) -> dict[str, float]:
    """What reward.json holds, or else reward.txt; of both the lower, since code under test may have put one there."""
    found, broken = list[dict[str, float]](), list[NoVerdict]()
    for name, parsed in (("reward.json", _named), ("reward.txt", _number)):
        try:
            if (data := _read(directory / name)) is not None:
                found.append(parsed(data))
        except NoVerdict as error:
            broken.append(error)
    if not found:
        raise broken[0] if broken else NoVerdict("left neither reward.json nor reward.txt")
    named, number = found[0], found[-1].get("reward", math.inf)
    return named if _total(named) <= number else {**named, "reward": number}


def _total(named: dict[str, float]) -> float:
    """What counts where the judger says nothing else."""
    return named["reward"] if "reward" in named else math.fsum(named.values())


def _number(data: bytes) -> dict[str, float]:
    try:
        return {"reward": _finite(float(data.decode()), "reward.txt")}
    except ValueError as error:
        raise NoVerdict(f"left a reward.txt that is no number: {data[:80]!r}") from error


def _named(data: bytes) -> dict[str, float]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise NoVerdict(f"left a reward.json that is no JSON: {error}") from error
    if not isinstance(value, dict) or not value or len(value) > _MOST_PARTS:
        raise NoVerdict(f"left a reward.json without named numbers: {data[:80]!r}")
    return {name: _finite(number, f"reward.json, {name}") for name, number in value.items()}


def _finite(number: Any, where: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise NoVerdict(f"left a reward that is no finite number: {where} is {number!r}")
    return float(number)


def _read(file: Path) -> bytes | None:
    """A small file that is one: code under test may have put a pipe or a link in its place."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoVerdict(f"left a reward that cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NoVerdict(f"left a {file.name} that is no file")
        data = os.read(handle, _MOST_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > _MOST_BYTES:
        raise NoVerdict(f"left a {file.name} that is too large for a reward")
    return data
