"""Scenarios as text, with one part changed."""

import pytest

from loopwright.scenario.load import load

GOOD = {
    "head": 'name = "study"\n[system]\nparallel = 2',
    "run": '[[run]]\nname = "first"',
    "agent": 'agent = { type = "random", trials = 4 }',
    "reward": 'reward = { type = "identity", metrics = ["y"] }',
    "workload": '[run.workload]\ntype = "command"\ncommand = "echo y={x}"\nmetrics = { y = { regex = "y=(.*)" } }',
    "args": "[run.workload.args]\nx = [1, 2]",
    "more": "",
}


@pytest.fixture
def write(tmp_path):
    """Writes a scenario whose named parts are replaced."""

    def write(**parts: str):
        path = tmp_path / "study.toml"
        path.write_text("\n".join({**GOOD, **parts}.values()))
        return path

    return write


@pytest.fixture
def loaded(write):
    def loaded(**parts: str):
        return load(write(**parts))

    return loaded
