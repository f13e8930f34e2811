"""Exact usage of a small command: started by a shell, because a child of a large process inherits its peak memory.

The kernel counts the memory that a process shares with its parent before it executes its program. So the command is
the child of a shell, which then turns into an interpreter that reports what its children used. The report arrives on
the shell's stdin, which is the writing end of a pipe; the command itself has an empty one.
"""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loopwright.execution.base import Command, Usage

_REPORT = (
    "import resource, sys; used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(used.ru_utime, used.ru_stime, used.ru_maxrss); sys.exit(int(sys.argv[1]))"
)
# A subshell with `exec`, or `true` and `echo` would be the shell's own. The empty line marks the end of the command:
# starting the interpreter is not part of its time.
_SCRIPT = f'(exec "$@" </dev/null); code=$?; echo >&0; exec "$0" -I -S -c \'{_REPORT}\' $code >&0'


class UsageReport:
    """What one command used, as its shell reports it."""

    def __init__(self, stack: ExitStack) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        stack.callback(os.close, self._read_fd)
        stack.callback(self._close_writing_end)
        self._stack, self._loop = stack, asyncio.get_running_loop()
        self._end_s: float | None = None
        self._text = b""

    @staticmethod
    def can_measure(command: Command) -> bool:
        """Whether the shell would find the program; otherwise starting it says what is missing."""
        program = command.argv[0] if command.argv else ""
        if "/" in program:
            return os.access(Path(command.directory, program), os.X_OK)
        return shutil.which(program, path=command.environment.get("PATH")) is not None

    def argv(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The shell with its command."""
        return ("/bin/sh", "-c", _SCRIPT, sys.executable, *argv)

    def attach(self) -> None:
        """Read the report as it arrives. From now on only the shell has the writing end."""
        self._close_writing_end()
        self._loop.add_reader(self._read_fd, self._read)
        self._stack.callback(self._loop.remove_reader, self._read_fd)

    def usage(self, usage: Usage, start_s: float) -> Usage:
        """The usage of the command instead of that of its shell; without memory if the command was ended early."""
        self._read()
        numbers = self._text.split()
        if len(numbers) != 3 or self._end_s is None:
            return {name: value for name, value in usage.items() if name != "max_rss_bytes"}
        user_s, system_s, max_rss_kib = map(float, numbers)
        wall_s = self._end_s - start_s
        return {"wall_s": wall_s, "user_s": user_s, "system_s": system_s, "max_rss_bytes": max_rss_kib * 1024}

    def _close_writing_end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        if chunk and self._end_s is None:
            self._end_s = time.monotonic()
        elif not chunk:
            self._loop.remove_reader(self._read_fd)
        self._text += chunk
