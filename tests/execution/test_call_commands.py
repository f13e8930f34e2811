"""Python functions as commands: what a call returns, and how it fails, where an executor runs commands."""

import asyncio
import math
import os
import sys

import pytest

from loopwright.execution.base import FunctionCall
from loopwright.execution.call_commands import CallCommands
from loopwright.execution.local.executor import LocalExecutor
from loopwright.testing.executors import ignore

MODULE = """
import os
def good(x): return {"y": x, "z": float("inf")}
def fail(x): raise ValueError("a file called \\udc80")
def vanish(x): os._exit(3)
"""


@pytest.fixture
def call(tmp_path):
    (tmp_path / "work.py").write_text(MODULE)

    def call(name: str):
        async def main():
            calls = CallCommands(LocalExecutor(), sys.executable)
            try:
                return await calls.call(
                    FunctionCall(
                        function=f"work:{name}",
                        path=(tmp_path,),
                        arguments={"x": 2},
                        environment={"PATH": os.environ["PATH"]},
                        directory=tmp_path / name,
                        parameters=b"{}",
                    ),
                    ignore,
                )
            finally:
                await calls.close()

        return asyncio.run(main())

    return call


def test_values_errors_and_deaths_are_told_apart(call, tmp_path):
    assert call("good").value == {"y": 2, "z": math.inf}
    assert call("fail").error.endswith("ValueError: a file called \udc80\n")
    assert (tmp_path / "fail/stderr").read_text().endswith("ValueError: a file called \\udc80\n")
    assert call("vanish").worker_exit == "exit code 3"
