"""The Python workload: return values, and problems detected before the function is called."""

import asyncio
import os

import pytest
from tests.workloads.behaviours import BEHAVIOURS

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.local.system import LocalSystem
from loopwright.testing import WorkloadContract
from loopwright.testing.executors import ignore
from loopwright.workloads.base import Job, Site
from loopwright.workloads.python import PythonConfig, PythonWorkload

MODULE = """
import math, os

def good(x=0): return {"y": x}
def needs(x, z): return {"y": x}
def empty(): return {}
def nothing(): return None
def text(): return {"y": "fast"}
def infinite(): return {"y": math.inf}
def undefined(): return {"y": math.nan}
def raising(): raise KeyError("missing")
def leaving(): raise SystemExit(3)
def dying(): os._exit(4)
def variable(): return {"y": float(os.environ["LEVEL"])}
def table(trainer): return {"y": trainer["lr"]}
async def later(): return {"y": 5}
not_callable = 5
"""


@pytest.fixture
def site(tmp_path):
    scenario_dir = tmp_path / "scenario"
    scenario_dir.mkdir()
    (scenario_dir / "workload_functions.py").write_text(MODULE)
    return Site(scenario_dir=scenario_dir, directory=tmp_path / "run", system=LocalSystem(grace_s=0.1))


def run(site: Site, name: str, arguments=None, **settings) -> Result:
    async def main() -> Result:
        config = PythonConfig(function=f"workload_functions:{name}", **settings)
        workload = PythonWorkload(config, site)
        job = Job(1, site.directory / "trials" / "1", arguments or {}, b"{}", f"test-{os.getpid()}.1", ignore)
        try:
            return await workload.run(job)
        finally:
            await workload.close()

    return asyncio.run(main())


class TestContract(WorkloadContract):
    def make_workload(self, site, behaviour, **settings):
        (site.scenario_dir / "behaviours.py").write_text(BEHAVIOURS)
        return PythonWorkload(PythonConfig(function=f"behaviours:{behaviour}", metrics=("length",), **settings), site)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("good", Outcome.OK, ""),
        ("later", Outcome.OK, ""),
        ("empty", Outcome.METRIC_MISSING, "no finite value for y; it returned no metrics"),
        ("nothing", Outcome.CRASHED, "must return a dict"),
        ("text", Outcome.CRASHED, "'y' is 'fast'"),
        ("infinite", Outcome.METRIC_MISSING, "y (inf)"),
        ("undefined", Outcome.METRIC_MISSING, "y (nan)"),
        ("raising", Outcome.CRASHED, "KeyError: 'missing'"),
        ("leaving", Outcome.CRASHED, "3"),
        ("dying", Outcome.CRASHED, "the worker process ended: exit code 4"),
        ("gone", Outcome.CRASHED, "gone"),
    ],
)
def test_the_outcome_of_a_call(site, name, outcome, words):
    result = run(site, name, metrics=("y",))
    assert result.outcome is outcome
    assert words in result.reason


def test_dotted_arguments_are_a_dict(site):
    config = PythonConfig(function="workload_functions:table", args={"trainer": {"lr": [1, 2], "on": True}})
    assert config.problems(site.scenario_dir) == []
    assert run(site, "table", {"trainer.lr": 2, "trainer.on": True}).metrics == {"y": 2}


def test_environment_variables_are_not_arguments(site):
    result = run(site, "variable", {"LEVEL": 7}, env={"LEVEL": [7, 8]})
    assert dict(result.metrics) == {"y": 7.0}


def test_a_changed_source_changes_the_fingerprint(site):
    def fingerprint() -> str:
        return PythonWorkload(PythonConfig(function="workload_functions:good"), site).fingerprint()

    before = fingerprint()
    (site.scenario_dir / "workload_functions.py").write_text(MODULE + "\n# changed")
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("function", "args", "key", "words"),
    [
        ("workload_functions:good", {"z": 1}, "args.z", "takes no argument 'z'"),
        ("workload_functions:needs", {"x": 1}, "args", "requires the argument 'z'"),
        ("workload_functions:gone", {}, "function", "has no 'gone'"),
        ("workload_functions:not_callable", {}, "function", "not a callable"),
        ("no_such_module:f", {}, "function", "no_such_module"),
    ],
)
def test_problems_are_detected_before_anything_runs(site, function, args, key, words):
    problems = PythonConfig(function=function, args=args).problems(site.scenario_dir)
    assert [problem.key for problem in problems if words in problem.message] == [key], problems
