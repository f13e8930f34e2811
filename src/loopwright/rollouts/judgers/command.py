"""The command judger: tests, or any program, in a scratch directory with the answer in it."""

import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from loopwright.core.errors import Problem
from loopwright.core.reward import Reward
from loopwright.execution.base import Command, Completion
from loopwright.execution.local.executor import GRACE_S, LocalExecutor
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.sandbox.files import remove_in_background
from loopwright.rollouts.judgers import scratch
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload
from loopwright.rollouts.judgers.needs import Needs
from loopwright.rollouts.judgers.verdict_parsing import as_reward
from loopwright.rollouts.threads import Threads

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", MARKER_VARIABLE)
_OUTPUT_BYTES = 2**20
_CLEAN_UP_S = 5.0


class CommandJudgerConfig(JudgerConfig):
    """A program whose exit code, or the number that it leaves, is the reward."""

    type: Literal["command"] = "command"
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, a list; no shell reads them. It runs in a scratch directory that holds
    `answer.txt`, `payload.json` and `files`; `LOOPWRIGHT_HOME` is the scenario's directory."""
    files: tuple[str, ...] = ()
    """Files and directories of the scenario that are copied into the scratch directory."""
    reward: Literal["exit_code", "file", "stdout"] = "exit_code"
    """`exit_code`: 1 for 0, 0 for any other; `file`: the number in reward.txt, or number or named parts in reward.json;
    `stdout`: the last word that is printed."""
    broken: float | None = None
    """The reward where the command runs out of time or is ended by a signal: set it where that is the answer's own
    doing, because the command runs code from it. Without it there is no verdict then."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further variables of its environment, which has little more than PATH: keys and tokens are not for it."""
    needs: Needs = ("answer", "label")
    """What stands in `payload.json`."""
    memory_limit: int | None = Field(default=None, gt=0)
    """Bytes of memory that each process of the command may use."""
    retries: int = Field(default=0, ge=0)
    """How often a failed verdict is tried again."""
    concurrency: int = Field(default=4, ge=1)
    """How many commands each worker runs at a time."""

    @field_validator("files")
    @classmethod
    def _inside(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} must lie in the scenario's directory")
        return files

    def problems(self, home: Path) -> list[Problem]:
        missing = (name for name in self.files if not (home / name).exists())
        return [Problem("files", f"there is no {name!r} in {home}.") for name in missing]

    def limit_s(self) -> float:
        # The executor ends the process tree at the timeout; this is for an executor that does not.
        return self.timeout_s + GRACE_S + _CLEAN_UP_S


class CommandJudger(Judger):
    """Runs the command once per verdict; nothing of it is left afterwards, not even if this process is killed."""

    Config: ClassVar[type[JudgerConfig]] = CommandJudgerConfig
    config: CommandJudgerConfig

    def __init__(self, config: CommandJudgerConfig, home: Path) -> None:
        super().__init__(config, home)
        self.needs = config.needs
        self._threads = Threads("loopwright-scratch", most=config.concurrency)
        self._executor = LocalExecutor(
            parallel=config.concurrency, memory_bytes=config.memory_limit, output_bytes=_OUTPUT_BYTES
        )
        self._reaper, self._numbers, self._closed = Reaper("judge"), count(1), False

    async def judge(self, payload: Payload) -> Reward:
        if self._closed:
            raise JudgeFailed("the judger was closed")
        self._reaper.start()
        root = self._reaper.directory
        prepare = partial(scratch.make, payload.only(self.needs), self.home, self.config.files, root)
        directory: Path = await self._threads.run(prepare)
        try:
            completion = await self._executor.run(self._command(directory), _unrecorded)
            return as_reward(self._verdict(directory, completion), self.config.label())
        finally:
            await remove_in_background(directory)

    def _command(self, directory: Path) -> Command:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {"HOME": str(directory), "TMPDIR": str(directory), "LOOPWRIGHT_HOME": str(self.home)}
        return Command(
            argv=self.config.command,
            directory=directory,
            environment={**kept, **own, **self.config.env},
            stdout=directory / ".stdout",
            stderr=directory / ".stderr",
            timeout_s=self.config.timeout_s,
            marker=f"{self._reaper.marker}.{next(self._numbers)}",
        )

    def _verdict(self, directory: Path, completion: Completion) -> Any:
        if completion.timed_out or completion.signal is not None:
            if self.config.broken is not None:
                return self.config.broken
            if completion.timed_out:
                raise JudgeFailed(f"the command was ended after {self.config.timeout_s:g} s")
            raise JudgeFailed(f"the command was ended by {signal_name(completion.signal or 0)}{_end_of(directory)}")
        match self.config.reward:
            case "exit_code":
                return float(completion.exit_code == 0)
            case "file":
                return scratch.recorded(directory)
        return scratch.printed(directory / ".stdout")

    async def close(self) -> None:
        self._closed = True
        await self._executor.close()
        self._threads.close()
        self._reaper.close()


def _unrecorded(pid: int, start_ticks: int) -> None:
    """A verdict is made again, not resumed, so that its process need not be known."""


def _end_of(directory: Path) -> str:
    text = (directory / ".stderr").read_bytes()[-300:].decode(errors="replace").strip()
    return f": {text}" if text else ""
