"""The shipped workloads keep the contract that a plug-in's workload must keep."""

import sys

from loopwright.testing import WorkloadContract
from loopwright.workloads.command import CommandConfig, CommandWorkload
from loopwright.workloads.python import PythonConfig, PythonWorkload

MODULE = """
import os, time


def measure(value):
    with open("seen", "wb") as file:
        file.write(value.encode())
    return {"length": len(value)}


def crash(value):
    raise RuntimeError("broken on purpose")


def hang(value):
    with open("pid", "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(1000)


def forget(value):
    return {"width": 1}
"""
SCRIPT = f"{MODULE}\nimport sys\nprint(globals()[sys.argv[1]](sys.argv[2]))\n"


class TestCommand(WorkloadContract):
    def make_workload(self, site, story, **settings):
        (site.scenario_dir / "script.py").write_text(SCRIPT)
        config = CommandConfig(
            command=(sys.executable, str(site.scenario_dir / "script.py"), story, "{value}"),
            metrics={"length": {"regex": "'length': ([0-9]+)"}},
            **settings,
        )
        return CommandWorkload(config, site)


class TestPython(WorkloadContract):
    def make_workload(self, site, story, **settings):
        (site.scenario_dir / "contract_stories.py").write_text(MODULE)
        return PythonWorkload(PythonConfig(function=f"contract_stories:{story}", metrics=("length",), **settings), site)
