"""The contract of every executor, as tests.

    class TestMyExecutor(ExecutorContract):
        def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
            return MyExecutor(parallel=parallel, output_bytes=output_bytes)

Commands are small shell scripts, so that the suite also works on machines without Python.
"""
# ruff: noqa: S101  These are tests, although they are part of the package.

import asyncio
import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from loopwright.core.errors import LaunchError
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.processes import read

T = TypeVar("T")
C = TypeVar("C", bound="Closable")
DEADLINE_S = 60.0
_LIMIT_BYTES = 1 << 20
_number = iter(range(1, 1 << 30))


class Closable(Protocol):
    """What a suite tests: executors, engines, workers."""

    async def close(self) -> None:
        """Release everything."""


def command(directory: Path, script: str, *, timeout_s: float | None = DEADLINE_S) -> Command:
    """A shell script as a command that runs in `directory`."""
    return Command(
        argv=("/bin/sh", "-c", script),
        directory=directory,
        environment={"PATH": os.environ.get("PATH", os.defpath)},
        stdout=directory / "stdout",
        stderr=directory / "stderr",
        timeout_s=timeout_s,
        marker=f"contract-{os.getpid()}-{next(_number)}",
    )


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    process = read(pid)
    return process is not None and not process.zombie


def written_pid(path: Path) -> int:
    """The process id that a script writes to `path`; waits for it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (text := path.read_text() if path.exists() else "").endswith("\n"):
        assert time.monotonic() < deadline_s, f"{path} was not written"
        time.sleep(0.005)
    return int(text)


async def appears(path: Path) -> None:
    """Wait for a script to write `path`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text().endswith("\n"):  # noqa: ASYNC240  Test code.
        assert time.monotonic() < deadline_s, f"{path} was not written"
        await asyncio.sleep(0.005)


def use_and_close(make: Callable[[], C], body: Callable[[C], Awaitable[T]], deadline_s: float = DEADLINE_S) -> T:
    """Run `body` with a new object in an event loop, and close the object."""

    async def main() -> T:
        made = make()
        try:
            return await asyncio.wait_for(body(made), deadline_s)
        finally:
            await made.close()

    return asyncio.run(main())


def ignore(handle: str) -> None:
    """An `on_start` callback that records nothing."""


class ExecutorContract(ABC):
    """Subclass it as `Test…` and implement `make_executor`."""

    @abstractmethod
    def make_executor(self, parallel: int = 2, output_bytes: int = _LIMIT_BYTES) -> Executor:
        """An executor with a short time between SIGTERM and SIGKILL."""

    def use(
        self, body: Callable[[Executor], Awaitable[T]], *, parallel: int = 2, output_bytes: int = _LIMIT_BYTES
    ) -> T:
        """Run `body` with an executor in an event loop, and close the executor."""
        return use_and_close(lambda: self.make_executor(parallel, output_bytes), body)

    def run(self, command: Command, on_start: OnStart = ignore, *, output_bytes: int = _LIMIT_BYTES) -> Completion:
        """Run one command until it ends."""
        return self.use(lambda executor: executor.run(command, on_start), output_bytes=output_bytes)

    def test_success_has_exit_code_zero_and_usage(self, tmp_path: Path) -> None:
        """Given a command that succeeds, the completion has its exit code and usage."""
        done = self.run(command(tmp_path, "exit 0"))
        assert (done.exit_code, done.signal, done.timed_out) == (0, None, False)
        assert done.usage["wall_s"] > 0

    def test_peak_memory_is_exact_or_unknown(self, tmp_path: Path) -> None:
        """Given a process larger than ours, its peak is reported; that of a smaller one is unknown."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        large = self.run(command(tmp_path, f"exec head -c {2 * own} /dev/zero | tail -c {2 * own} >/dev/null"))
        assert 2 * own < large.usage["max_rss_bytes"] < 3 * own
        assert "max_rss_bytes" not in self.run(command(tmp_path, "exit 0")).usage

    @pytest.mark.parametrize("code", [1, 3, 255])
    def test_exit_codes_are_reported(self, tmp_path: Path, code: int) -> None:
        """A failing command does not raise: its exit code is data."""
        assert self.run(command(tmp_path, f"exit {code}")).exit_code == code

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    def test_a_signal_is_not_an_exit_code(self, tmp_path: Path, number: int) -> None:
        """It is not reported as 128 plus its number."""
        done = self.run(command(tmp_path, f"kill -{int(number)} $$"))
        assert (done.exit_code, done.signal, done.timed_out) == (None, number, False)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    def test_signals_that_we_ignore_have_their_default_effect(self, tmp_path: Path, number: int) -> None:
        """Started under `nohup` or as a background job, Loopwright ignores signals that trials must not ignore."""
        before = signal.signal(number, signal.SIG_IGN)
        try:
            done = self.run(command(tmp_path, f"kill -{int(number)} $$"))
        finally:
            signal.signal(number, before)
        assert (done.exit_code, done.signal) == (None, number)

    def test_output_goes_to_its_files(self, tmp_path: Path) -> None:
        """Both streams are separate, and their bytes are counted."""
        done = self.run(command(tmp_path, "echo result; echo trouble >&2"))
        assert (tmp_path / "stdout").read_text() == "result\n"
        assert (tmp_path / "stderr").read_text() == "trouble\n"
        assert (done.stdout_bytes, done.stderr_bytes) == (7, 8)

    def test_a_silent_command_has_empty_files(self, tmp_path: Path) -> None:
        """The files always exist."""
        self.run(command(tmp_path, "true"))
        assert (tmp_path / "stdout").read_bytes() == (tmp_path / "stderr").read_bytes() == b""

    def test_bytes_are_unchanged(self, tmp_path: Path) -> None:
        """Output need not be UTF-8."""
        self.run(command(tmp_path, r"printf '\377\000\376\n'"))
        assert (tmp_path / "stdout").read_bytes() == b"\xff\x00\xfe\n"

    def test_long_output_keeps_its_beginning_and_its_end(self, tmp_path: Path) -> None:
        """The middle is omitted from the file, but counted."""
        script = "echo first; head -c 300000 /dev/zero; echo; echo last"
        done = self.run(command(tmp_path, script), output_bytes=1000)
        data = (tmp_path / "stdout").read_bytes()
        assert done.stdout_bytes == 6 + 300000 + 1 + 5
        assert data.startswith(b"first\n")
        assert data.endswith(b"\nlast\n")
        omitted = int(data.partition(b"[loopwright: ")[2].partition(b" ")[0])
        marker = b"\n[loopwright: %d bytes left out]\n" % omitted
        assert len(data) - len(marker) + omitted == done.stdout_bytes

    def test_directory_and_environment_are_the_commands_own(self, tmp_path: Path) -> None:
        """Our own environment does not leak into a trial."""
        base = command(tmp_path, 'pwd; echo "$KNOB"; echo "${HOME-none}"')
        self.run(replace(base, environment={**base.environment, "KNOB": "a b"}))
        assert (tmp_path / "stdout").read_text() == f"{tmp_path.resolve()}\na b\nnone\n"

    def test_input_is_empty(self, tmp_path: Path) -> None:
        """A command that reads standard input does not hang."""
        assert self.run(command(tmp_path, "cat; echo over")).stdout_bytes == 5

    def test_on_start_comes_first(self, tmp_path: Path) -> None:
        """A handle is recorded once, before the end; each command has its own."""
        handles: list[str] = []
        for _ in range(2):
            self.run(command(tmp_path, "true"), handles.append)
        assert len(set(handles)) == 2
        assert all(handles)

    def test_an_on_start_that_raises_ends_the_process(self, tmp_path: Path) -> None:
        """A process that cannot be recorded must not run."""

        def refuse(_: str) -> None:
            raise OSError("the ledger is gone")

        with pytest.raises(OSError, match="ledger"):
            self.run(command(tmp_path, "echo $$ > pid; exec sleep 100"), refuse)
        pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
        assert not pid or not alive(int(pid))

    def test_a_timeout_ends_the_command(self, tmp_path: Path) -> None:
        """It is reported separately from a signal."""
        done = self.run(command(tmp_path, "echo begun; sleep 100", timeout_s=0.3))
        assert done.timed_out
        assert (tmp_path / "stdout").read_text() == "begun\n"

    def test_a_timeout_lets_the_command_clean_up(self, tmp_path: Path) -> None:
        """SIGTERM is sent first."""
        script = "trap 'echo tidy; exit 7' TERM; sleep 100 & wait"
        done = self.run(command(tmp_path, script, timeout_s=0.3))
        assert (done.timed_out, done.exit_code) == (True, 7)
        assert (tmp_path / "stdout").read_text() == "tidy\n"

    def test_a_command_that_ignores_sigterm_is_killed(self, tmp_path: Path) -> None:
        """SIGKILL follows after the grace period."""
        done = self.run(command(tmp_path, "trap '' TERM; while :; do sleep 0.1; done", timeout_s=0.3))
        assert (done.timed_out, done.signal) == (True, signal.SIGKILL)

    @pytest.mark.parametrize("timeout_s", [0.5, DEADLINE_S], ids=["timeout", "success"])
    def test_daemons_end_with_their_trial(self, tmp_path: Path, timeout_s: float) -> None:
        """Processes that left the session and the group are ended too, after a timeout and after success."""
        stay = "sleep 100" if timeout_s < 1 else "while [ ! -s daemon ]; do sleep 0.01; done"
        script = f"(setsid sh -c 'echo $$ > daemon; exec sleep 100' >/dev/null 2>&1 &) ; {stay}"
        self.run(command(tmp_path, script, timeout_s=timeout_s))
        assert not alive(written_pid(tmp_path / "daemon"))

    def test_a_daemon_with_open_output_is_not_awaited(self, tmp_path: Path) -> None:
        """The trial ends with its command, not when its pipes are closed."""
        done = self.run(command(tmp_path, "setsid sleep 100 & echo done"))
        assert done.exit_code == 0
        assert (tmp_path / "stdout").read_text() == "done\n"

    def test_cancelling_ends_the_tree(self, tmp_path: Path) -> None:
        """The cancellation is raised once nothing is running."""

        async def body(executor: Executor) -> None:
            run = asyncio.ensure_future(executor.run(command(tmp_path, "sleep 100 & echo $! > child; wait"), ignore))
            await appears(tmp_path / "child")
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run

        self.use(body)
        assert not alive(written_pid(tmp_path / "child"))

    def test_a_second_cancellation_changes_nothing(self, tmp_path: Path) -> None:
        """It does not interrupt the ending of the tree."""

        async def body(executor: Executor) -> None:
            script = "trap '' TERM; echo $$ > child; while :; do sleep 0.1; done"
            run = asyncio.ensure_future(executor.run(command(tmp_path, script), ignore))
            await appears(tmp_path / "child")
            for _ in range(2):
                run.cancel()
                await asyncio.sleep(0.05)
            with pytest.raises(asyncio.CancelledError):
                await run
            assert not alive(written_pid(tmp_path / "child"))

        self.use(body)

    def test_kill_all_ends_all_running_commands(self, tmp_path: Path) -> None:
        """Immediately, and each run completes."""

        async def body(executor: Executor) -> list[Completion]:
            directories = [tmp_path / name for name in "ab"]
            for directory in directories:
                directory.mkdir()
            runs = [
                asyncio.ensure_future(
                    executor.run(command(directory, "trap '' TERM; echo $$ > pid; sleep 100"), ignore)
                )
                for directory in directories
            ]
            for directory in directories:
                await appears(directory / "pid")
            executor.kill_all()
            return await asyncio.gather(*runs)

        assert [done.signal for done in self.use(body)] == [signal.SIGKILL] * 2

    def test_parallel_runs_do_not_interfere(self, tmp_path: Path) -> None:
        """Each has its own output and its own end."""

        async def body(executor: Executor) -> list[Completion]:
            def nth(number: int) -> Command:
                directory = tmp_path / str(number)
                directory.mkdir()
                return command(directory, f"sleep 0.0{number}; echo {number}; exit {number}")

            return await asyncio.gather(*(executor.run(nth(number), ignore) for number in range(9)))

        assert [done.exit_code for done in self.use(body, parallel=3)] == list(range(9))
        assert [(tmp_path / str(number) / "stdout").read_text() for number in range(9)] == [f"{n}\n" for n in range(9)]

    def test_no_more_than_parallel_run_at_a_time(self, tmp_path: Path) -> None:
        """The others wait."""
        script = "mkdir ../lock || exit 9; sleep 0.05; rmdir ../lock"

        async def body(executor: Executor) -> list[Completion]:
            directories = [tmp_path / str(number) for number in range(4)]
            for directory in directories:
                directory.mkdir()
            return await asyncio.gather(
                *(executor.run(command(directory, script), ignore) for directory in directories)
            )

        assert [done.exit_code for done in self.use(body, parallel=1)] == [0] * 4

    def test_a_missing_command_is_a_launch_error(self, tmp_path: Path) -> None:
        """The message names it, and the executor keeps working."""

        async def body(executor: Executor) -> Completion:
            with pytest.raises(LaunchError, match="no-such-program") as caught:
                await executor.run(replace(command(tmp_path, ""), argv=("no-such-program",)), ignore)
            assert not caught.value.infra
            return await executor.run(command(tmp_path, "true"), ignore)

        assert self.use(body, parallel=1).exit_code == 0

    def test_a_file_that_is_not_executable_is_a_launch_error(self, tmp_path: Path) -> None:
        """The message names the fix."""
        (tmp_path / "bench").write_text("#!/bin/sh\n")
        (tmp_path / "bench").chmod(0o644)
        with pytest.raises(LaunchError, match="chmod"):
            self.run(replace(command(tmp_path, ""), argv=("./bench",)))
