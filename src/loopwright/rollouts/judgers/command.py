"""The command judger: runs tests, or any program, in a scratch directory that contains the answer."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field, field_validator

from loopwright.core.errors import Problem
from loopwright.core.trial import Reward
from loopwright.execution.base import Command, Completion
from loopwright.execution.files import remove, remove_in_background
from loopwright.execution.local.executor import GRACE_S, LocalExecutor
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.reaper import Reaper
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Needs, Payload
from loopwright.rollouts.judgers.verdict_parsing import as_reward
from loopwright.rollouts.threads import Threads

_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", MARKER_VARIABLE)
_MAX_BYTES = 2**20
_CLEAN_UP_S = 5.0


class CommandJudgerConfig(JudgerConfig):
    """A program whose exit code, or a number that it writes, is the reward."""

    type: Literal["command"] = "command"
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, as a list, without a shell. It runs in a scratch directory with `answer.txt`,
    `payload.json` and `files`; `LOOPWRIGHT_HOME` is the scenario's directory."""
    files: tuple[str, ...] = ()
    """Files and directories of the scenario that are copied into the scratch directory."""
    reward: Literal["exit_code", "file", "stdout"] = "exit_code"
    """`exit_code`: 1 for 0, otherwise 0; `file`: the number in reward.txt, or the number or named parts in reward.json;
    `stdout`: the last word that is printed."""
    broken: float | None = None
    """The reward if the command times out or is killed by a signal. Set it if the answer can cause that, because the
    command runs code from it. Without it, the verdict is missing."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables. The command inherits little more than PATH, and no keys or tokens."""
    needs: Needs = ("answer", "label")
    """The facts in `payload.json`."""
    memory_limit: int | None = Field(default=None, gt=0)
    """Bytes of memory that each process of the command may use."""
    retries: int = Field(default=0, ge=0)
    """How often a failed verdict is attempted again."""
    concurrency: int = Field(default=4, ge=1)
    """How many commands each worker runs at a time."""

    @field_validator("files")
    @classmethod
    def _check_inside(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name!r} must lie in the scenario's directory")
        return files

    def problems(self, scenario_dir: Path) -> list[Problem]:
        missing = (name for name in self.files if not (scenario_dir / name).exists())
        return [Problem("files", f"{name!r} does not exist in {scenario_dir}.") for name in missing]

    def attempt_timeout_s(self) -> float:
        # The executor kills the process tree at `timeout_s`; this is a second line of defence.
        return self.timeout_s + GRACE_S + _CLEAN_UP_S


class CommandJudger(Judger):
    """Runs the command once per verdict. It leaves nothing behind, even if this process is killed."""

    Config: ClassVar[type[JudgerConfig]] = CommandJudgerConfig
    config: CommandJudgerConfig

    def __init__(self, config: CommandJudgerConfig, scenario_dir: Path = Path()) -> None:
        super().__init__(config, scenario_dir)
        self.needs = config.needs
        self._threads = Threads("loopwright-scratch", max_threads=config.concurrency)
        self._executor = LocalExecutor(
            parallel=config.concurrency, memory_bytes=config.memory_limit, output_bytes=_MAX_BYTES
        )
        self._reaper, self._numbers, self._closed = Reaper("judge"), count(1), False

    async def judge(self, payload: Payload) -> Reward:
        if self._closed:
            raise JudgeFailed("the judger was closed")
        self._reaper.start()
        prepare = partial(
            _make_scratch, payload.only(self.needs), self.scenario_dir, self.config.files, self._reaper.directory
        )
        directory: Path = await self._threads.run(prepare)
        try:
            # A verdict is computed again after a crash, not resumed, so its process is not recorded.
            completion = await self._executor.run(self._command(directory), lambda *_: None)
            return as_reward(self._verdict(directory, completion), self.config.label())
        finally:
            await remove_in_background(directory)

    def _command(self, directory: Path) -> Command:
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        own = {"HOME": str(directory), "TMPDIR": str(directory), "LOOPWRIGHT_HOME": str(self.scenario_dir)}
        return Command(
            argv=self.config.command,
            directory=directory,
            environment={**inherited, **own, **self.config.env},
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
                raise JudgeFailed(f"the command was killed after {self.config.timeout_s:g} s")
            stderr = (directory / ".stderr").read_bytes()[-300:].decode(errors="replace").strip()
            killed = f"the command was killed by {signal_name(completion.signal or 0)}"
            raise JudgeFailed(f"{killed}: {stderr}" if stderr else killed)
        match self.config.reward:
            case "exit_code":
                return float(completion.exit_code == 0)
            case "file":
                return _read_reward(directory)
        with (directory / ".stdout").open("rb") as stdout:
            stdout.seek(max(0, os.fstat(stdout.fileno()).st_size - _MAX_BYTES))
            words = stdout.read().split()
        return _number(words[-1] if words else b"", "the end of the output")

    async def close(self) -> None:
        self._closed = True
        await self._executor.close()
        self._threads.close()
        self._reaper.close()


def _make_scratch(payload: Payload, scenario_dir: Path, files: Sequence[str], root: Path) -> Path:
    """A new directory below `root`, with answer.txt, payload.json and copies of the scenario's files."""
    try:
        facts = orjson.dumps(payload.as_json())
    except TypeError as error:
        raise JudgeFailed(f"what the judger needs is not JSON: {error}") from error
    directory = Path(tempfile.mkdtemp(dir=root))
    try:
        for name in files:
            source, target = scenario_dir / name, directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Copied, because a command that runs a policy's code must not reach the originals.
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


def _read_reward(directory: Path) -> Any:
    """What the command wrote into reward.json or reward.txt; JudgeFailed if there is not exactly one of them."""
    names = [name for name in ("reward.json", "reward.txt") if (directory / name).is_file()]
    if len(names) != 1:
        raise JudgeFailed(f"the command left {' and '.join(names) or 'neither reward.json nor reward.txt'}")
    with (directory / names[0]).open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise JudgeFailed(f"{names[0]} is too large for a verdict")
    if names[0] == "reward.txt":
        return _number(data, names[0])
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise JudgeFailed(f"reward.json is not JSON: {error}") from error
    if isinstance(value, dict) and len(value) == 1 and ("reward" in value or "rewards" in value):
        (value,) = value.values()
    return value


def _number(data: bytes, where: str) -> float:
    try:
        return float(data.decode())
    except ValueError as error:
        raise JudgeFailed(f"{where} is not a number: {data[:80]!r}") from error
