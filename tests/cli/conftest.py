"""The command line as a user runs it: a separate process, its exit code and its output."""

import subprocess

import pytest
from tests.command_line import run_verb

SCENARIO = """
name = "study"
[system]
parallel = 2
[[run]]
name = "first"
agent = {agent}
reward = {{ type = "identity", metrics = ["y"] }}
[run.workload]
type = "command"
command = "{command}"
metrics = {{ y = {{ regex = "y=([0-9.]+)" }} }}
[run.workload.args]
x = [1, 2, 3]
mode = ["two words", "b"]
{more}
"""


@pytest.fixture
def loopwright(tmp_path):
    """Runs a verb in an empty directory."""

    def loopwright(*words: object) -> subprocess.CompletedProcess[str]:
        return run_verb(tmp_path, *words)

    return loopwright


@pytest.fixture
def scenario(tmp_path):
    def scenario(
        command: str = "echo y={x} '{mode}'", agent: str = '{ type = "grid" }', more: str = "", name: str = "study.toml"
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SCENARIO.format(command=command, agent=agent, more=more))
        return path

    return scenario
