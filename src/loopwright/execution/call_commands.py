"""Python functions as commands: each call is its own process, wherever an executor runs commands."""

import json
from pathlib import Path

import orjson

from loopwright.core.errors import storage
from loopwright.execution.base import CallExecutor, CallResult, Command, Executor, FunctionCall, OnStart
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE

_WORKER = str(Path(__file__).parent / "local" / "worker_main.py")
CALL, RESULT = ".call.json", ".result.json"
"""Files of the trial's directory: what to call, and what came of it."""


class CallCommands(CallExecutor):
    """Makes each call by a command. Its timeout includes the import of its module."""

    def __init__(self, executor: Executor, python: str) -> None:
        self._executor, self._python = executor, python

    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        directory = call.directory
        if not call.handle:
            frame = {
                "path": [str(entry) for entry in call.path],
                "function": call.function,
                "arguments": call.arguments,
                "directory": str(directory),
                "parameters": call.parameters.decode(),
                "reports": False,
                "checkpoint": None if call.checkpoint is None else str(call.checkpoint),
                "variable": f"{call.environment.get(MARKER_VARIABLE, '')}:{call.marker}",
            }
            with storage(directory):
                directory.mkdir(parents=True, exist_ok=True)
                (directory / CALL).write_bytes(orjson.dumps(frame))
        command = Command(
            # As a file instead of -m, like a local worker: a user's modules get a clean interpreter.
            argv=(self._python, "-P", _WORKER, str(directory / CALL), str(directory / RESULT)),
            directory=directory,
            environment=call.environment,
            stdout=directory / "stdout",
            stderr=directory / "stderr",
            timeout_s=call.timeout_s,
            marker=call.marker,
            handle=call.handle,
            nodes=call.nodes,
            gpus=call.gpus,
            once=True,
        )
        done = await self._executor.run(command, on_start)
        sizes = done.stdout_bytes, done.stderr_bytes
        result = directory / RESULT
        if done.timed_out:
            return CallResult(done.usage, *sizes, timed_out=True)
        if not result.exists():
            code = f"exit code {done.exit_code}" if done.signal is None else signal_name(done.signal)
            return CallResult(done.usage, *sizes, worker_exit=done.reason or code)
        response = json.loads(result.read_bytes())  # not orjson: errors may contain lone surrogates
        if "storage" in response:
            with storage(directory):
                raise OSError(*response["storage"])
        value = response.get("value")
        if value is not None:
            value |= {name: float(text) for name, text in response["nonfinite"].items()}
        return CallResult(response["usage"], *sizes, value=value, error=response.get("error"))

    def kill_all(self) -> None:
        self._executor.kill_all()

    async def close(self) -> None:
        await self._executor.close()
