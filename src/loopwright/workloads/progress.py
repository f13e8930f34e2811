"""Progress of a command: intermediate metrics from its output, or from a file it appends to, as they are written.

Files are polled, so this works for every executor that writes a trial's output to the trial's directory.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import regex

from loopwright.core.outcome import Outcome
from loopwright.core.progress import Reporter
from loopwright.core.trial import Result
from loopwright.workloads.command_config import ProgressConfig

_POLL_S = 0.05
_MATCH_S = 0.5
_READ_BYTES = 1 << 20
_LINE_BYTES = 64 * 1024
"""A longer line is not progress; its beginning is dropped."""


class PatternTooSlow(Exception):
    """A pattern that takes too long for the lines of a command."""


class ProgressReader:
    """Reads the lines that a trial has written since the last time, and reports their steps."""

    def __init__(self, config: ProgressConfig, directory: Path, report: Reporter) -> None:
        self._path = directory / (config.file or config.stream)
        self._pattern = None if config.regex is None else regex.compile(config.regex.encode())
        self._report = report
        self._offset = self._steps = 0
        self._rest = b""
        self.ended = asyncio.Event()
        """Set once the command has ended: then `watch` reads the rest and returns."""

    async def watch(self) -> Result | None:
        """Report steps as they are written, until the trial is to stop, or until its end."""
        while True:
            ended = self.ended.is_set()
            if (result := await self._catch_up(at_end=ended)) is not None or ended:
                return result
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _POLL_S)

    async def _catch_up(self, *, at_end: bool) -> Result | None:
        """Report what is new; a result if the trial is to stop there. At the end the last line needs no newline."""
        while (chunk := self._read()) or (at_end and self._rest):
            try:
                # Off the event loop: a pattern may be slow.
                points = await asyncio.to_thread(self._points, self._rest + chunk, at_end=not chunk)
            except PatternTooSlow as error:
                return Result(Outcome.METRIC_MISSING, reason=f"progress: {error}")
            if any(self._report(step, metrics) for step, metrics in points):
                return Result(Outcome.STOPPED)
        return None

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(_READ_BYTES)
        except OSError:  # not written yet, or deleted by the command
            return b""
        self._offset += len(chunk)
        return chunk

    def _points(self, text: bytes, *, at_end: bool) -> list[tuple[int, dict[str, float]]]:
        *lines, self._rest = [*text.split(b"\n"), b""] if at_end else text.split(b"\n")
        self._rest = self._rest[-_LINE_BYTES:]
        return [point for line in lines for point in self._of_line(line[-_LINE_BYTES:])]

    def _of_line(self, line: bytes) -> Iterator[tuple[int, dict[str, float]]]:
        values: dict[str, object] = {}
        if self._pattern is None:
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError):
                return
            values = parsed if isinstance(parsed, dict) else {}
        else:
            try:
                match = self._pattern.search(line, timeout=_MATCH_S, concurrent=True)
            except TimeoutError as error:
                text = f"matching {self._pattern.pattern.decode()!r} in a line of {len(line):,} bytes took more than"
                raise PatternTooSlow(f"{text} {_MATCH_S:g} s. Avoid repeats within repeats, such as (a+)+") from error
            if match is None:
                return
            values = {name: text.decode(errors="replace") for name, text in match.groupdict().items() if text}
        numbers = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        step = numbers.pop("step", None)
        self._steps = self._steps + 1 if step is None or not math.isfinite(step) else int(step)
        if numbers:
            yield self._steps, numbers


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
