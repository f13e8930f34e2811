"""The scratch directory of one command: what it is judged by is put there, and its verdict is read from there."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from loopwright.execution.sandbox.files import remove
from loopwright.rollouts.judgers.base import JudgeFailed, Payload

_MOST_BYTES = 2**20


def make(payload: Payload, home: Path, files: Sequence[str], root: Path) -> Path:
    """A new directory below `root`, with answer.txt, payload.json and copies of the scenario's files."""
    try:
        facts = orjson.dumps(payload.as_json())
    except TypeError as error:
        raise JudgeFailed(f"what the judger needs is not JSON: {error}") from error
    directory = Path(tempfile.mkdtemp(dir=root))
    try:
        for name in files:
            source, target = home / name, directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Copies: a command that runs a policy's code must not reach the originals.
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)
        (directory / "payload.json").write_bytes(facts)
        answer = payload.facts.get("answer")
        if isinstance(answer, str):
            (directory / "answer.txt").write_bytes(answer.encode(errors="surrogatepass"))
    except BaseException:
        remove(directory)
        raise
    return directory


def recorded(directory: Path) -> Any:
    """What the command wrote into reward.json or reward.txt; JudgeFailed if that cannot be told."""
    found = [name for name in ("reward.json", "reward.txt") if (directory / name).is_file()]
    if len(found) != 1:
        raise JudgeFailed(f"the command left {' and '.join(found) or 'neither reward.json nor reward.txt'}")
    data = _head(directory / found[0])
    if found[0] == "reward.txt":
        return _number(data, found[0])
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise JudgeFailed(f"reward.json is no JSON: {error}") from error
    if isinstance(value, dict) and len(value) == 1 and ("reward" in value or "rewards" in value):
        (value,) = value.values()
    return value


def printed(stdout: Path) -> float:
    """The number in the last line of the output; JudgeFailed if there is none."""
    with stdout.open("rb") as file:
        file.seek(max(0, stdout.stat().st_size - _MOST_BYTES))
        lines = file.read().split()
    return _number(lines[-1] if lines else b"", "the end of the output")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise JudgeFailed(f"{path.name} is too large for a verdict")
    return data


def _number(data: bytes, where: str) -> float:
    try:
        return float(data.decode())
    except ValueError as error:
        raise JudgeFailed(f"{where} is no number: {data[:80]!r}") from error
