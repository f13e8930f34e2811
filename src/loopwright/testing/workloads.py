"""The contract of every workload, as tests, and an in-process workload for testing everything else.

    class TestMyWorkload(WorkloadContract):
        def make_workload(self, site: Site, behaviour: Behaviour, **settings: Any) -> Workload:
            return MyWorkload(MyConfig(script=SCRIPTS[behaviour], **settings), site)

A behaviour is what a trial does; each gets one argument, `value`, a string.
"""
# ruff: noqa: S101  These are tests, although they are part of the package.

import asyncio
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import OnStart
from loopwright.execution.local.processes import start_ticks
from loopwright.execution.local.system import LocalSystem
from loopwright.testing.executors import alive, appears, ignore, use_and_close, written_pid
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig

T = TypeVar("T")
Behaviour = Literal["measure", "crash", "hang", "forget"]
"""`measure`: write `value` unchanged to the file `seen` in the working directory, as UTF-8, and return the metric
`length`, its number of characters. `crash`: fail. `hang`: write the process id and a newline to the file `pid` in the
working directory, then never end. `forget`: succeed without the metric `length`."""

HOSTILE = (
    "; touch broken",
    "$(touch broken)",
    "`touch broken`",
    "a && touch broken",
    "| tee broken",
    "> broken",
    "two words",
    "  spaces around  ",
    "'single' and \"double\"",
    'an open "quote',
    "back\\slash \\n",
    "new\nline",
    "--option",
    "-rf",
    "*",
    "~",
    "$HOME",
    "{value}",
    "%s %d",
    "ünï©ode ✓ 🦔",
    "",
)
"""Values that a shell, a template or a careless split would misinterpret."""


class FunctionWorkload(Workload):
    """Calls a function in this process: a fake for tests of agents and environments, since nothing here can be killed.

        FunctionWorkload(lambda x: {"y": x * x}, site)

    The function returns metrics or a Result, or raises, which is a crash; it may be asynchronous.
    """

    def __init__(self, function: Callable[..., Any], site: Site) -> None:
        super().__init__(WorkloadConfig(type="function"), site)
        self.function = function

    async def run(self, job: Job) -> Result:
        try:
            value = self.function(**job.arguments)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:  # noqa: BLE001  Any exception is a crash of the trial.
            return Result(Outcome.CRASHED, reason=repr(error))
        return value if isinstance(value, Result) else Result(Outcome.OK, value)


class WorkloadContract(ABC):
    """Subclass it as `Test…` and implement `make_workload`."""

    @abstractmethod
    def make_workload(
        self, site: Site, behaviour: Behaviour, *, timeout_s: float | None = None, files: tuple[str, ...] = ()
    ) -> Workload:
        """A workload whose trials behave as requested, and which requires the metric `length`."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        """Directories of a scenario and a run, and a short grace period."""
        scenario_dir = tmp_path / "scenario"
        scenario_dir.mkdir()
        return Site(scenario_dir=scenario_dir, directory=tmp_path / "run", system=LocalSystem(parallel=2, grace_s=0.1))

    def use(self, workload: Workload, body: Callable[[Workload], Awaitable[T]]) -> T:
        """Run `body` with an open workload in an event loop."""
        return use_and_close(lambda: workload, body)

    def run(self, workload: Workload, value: str = "abc") -> Result:
        """Run one trial until it ends."""
        return self.use(workload, lambda workload: workload.run(job(workload.site, value)))

    def test_a_good_trial_is_ok_with_its_metrics_and_usage(self, site: Site) -> None:
        """Given a trial that succeeds, the result has its metrics and its usage."""
        result = self.run(self.make_workload(site, "measure"))
        assert (result.outcome, result.fault, dict(result.metrics)) == (Outcome.OK, None, {"length": 3})
        assert result.usage["wall_s"] > 0

    def test_a_failure_is_a_result(self, site: Site) -> None:
        """A crash is data, with a reason and without metrics."""
        result = self.run(self.make_workload(site, "crash"))
        assert (result.outcome, result.fault, dict(result.metrics)) == (Outcome.CRASHED, Fault.WORKLOAD, {})
        assert result.reason

    def test_a_missing_metric_is_named(self, site: Site) -> None:
        """Exiting successfully is not enough."""
        result = self.run(self.make_workload(site, "forget"))
        assert (result.outcome, result.fault) == (Outcome.METRIC_MISSING, Fault.WORKLOAD)
        assert "length" in result.reason

    def test_a_timeout_ends_the_trial(self, site: Site) -> None:
        """After the timeout its process is gone, and the outcome says why."""
        pids: list[int] = []
        hanging = job(site, on_start=lambda handle: pids.append(int(handle.partition(":")[0])))
        workload = self.make_workload(site, "hang", timeout_s=0.3)
        result = self.use(workload, lambda workload: workload.run(hanging))
        assert (result.outcome, result.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
        assert pids
        assert not any(map(alive, pids))

    def test_cancelling_ends_the_process(self, site: Site) -> None:
        """An aborted trial leaves nothing running."""

        async def body(workload: Workload) -> None:
            trial = asyncio.ensure_future(workload.run(job(site)))
            await appears(directory(site) / "pid")
            trial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trial
            assert not alive(written_pid(directory(site) / "pid"))

        self.use(self.make_workload(site, "hang"), body)

    def test_killing_ends_the_process(self, site: Site) -> None:
        """`kill` is for a second signal: it acts immediately, outside the tasks of the event loop."""

        async def body(workload: Workload) -> Result:
            trial = asyncio.ensure_future(workload.run(job(site)))
            await appears(directory(site) / "pid")
            workload.kill()
            return await trial

        assert self.use(self.make_workload(site, "hang"), body).outcome is Outcome.CRASHED
        assert not alive(written_pid(directory(site) / "pid"))

    def test_the_process_is_recorded_before_it_can_be_orphaned(self, site: Site) -> None:
        """`on_start` gets the process id and start time by which a resumed run recognises the process."""
        pids: list[int] = []

        def record(handle: str) -> None:
            pid, _, ticks = handle.partition(":")
            assert start_ticks(int(pid)) == int(ticks)
            pids.append(int(pid))

        workload = self.make_workload(site, "measure")
        self.use(workload, lambda workload: workload.run(job(site, on_start=record)))
        assert pids
        assert os.getpid() not in pids

    @pytest.mark.parametrize("value", HOSTILE, ids=repr)
    def test_values_are_passed_unchanged(self, site: Site, value: str) -> None:
        """Whatever a value contains, none of it is executed."""
        assert self.run(self.make_workload(site, "measure"), value).outcome is Outcome.OK
        assert (directory(site) / "seen").read_bytes().decode() == value
        assert not list(site.scenario_dir.parent.rglob("*broken*"))

    def test_each_trial_has_its_own_directory(self, site: Site) -> None:
        """Concurrent trials do not interfere."""

        async def body(workload: Workload) -> list[Result]:
            return await asyncio.gather(*(workload.run(job(site, "x" * number, number)) for number in (1, 2, 3)))

        results = self.use(self.make_workload(site, "measure"), body)
        assert [result.metrics["length"] for result in results] == [1, 2, 3]
        assert [(directory(site, number) / "seen").read_text() for number in (1, 2, 3)] == ["x", "xx", "xxx"]

    def test_the_directory_keeps_the_parameters(self, site: Site) -> None:
        """They are in parameters.json."""
        self.run(self.make_workload(site, "measure"), "abc")
        assert json.loads((directory(site) / "parameters.json").read_bytes())["arguments"] == {"value": "abc"}

    def test_input_files_are_in_the_directory(self, site: Site) -> None:
        """They have the same relative paths as in the scenario."""
        (site.scenario_dir / "data").mkdir()
        (site.scenario_dir / "data" / "in.txt").write_text("input")
        assert self.run(self.make_workload(site, "measure", files=("data/in.txt",))).outcome is Outcome.OK
        assert (directory(site) / "data" / "in.txt").read_text() == "input"

    def test_a_changed_input_file_changes_the_fingerprint(self, site: Site) -> None:
        """Results for other contents must not be reused."""
        (site.scenario_dir / "in.txt").write_text("one")
        one, same = (self.make_workload(site, "measure", files=("in.txt",)).fingerprint() for _ in range(2))
        (site.scenario_dir / "in.txt").write_text("two")
        assert one == same != self.make_workload(site, "measure", files=("in.txt",)).fingerprint()

    def test_another_attempt_starts_in_a_clean_directory(self, site: Site) -> None:
        """The files of an interrupted attempt are kept elsewhere."""
        directory(site).mkdir(parents=True)
        (directory(site) / "half-written").write_text("…")
        assert self.run(self.make_workload(site, "measure")).outcome is Outcome.OK
        assert not (directory(site) / "half-written").exists()
        assert list(site.directory.rglob("half-written"))


def directory(site: Site, number: int = 1) -> Path:
    """The directory of a trial."""
    return site.directory / "trials" / str(number)


def job(site: Site, value: str = "abc", number: int = 1, on_start: OnStart = ignore) -> Job:
    """A trial with one argument."""
    arguments: Mapping[str, Any] = {"value": value}
    return Job(
        trial=number,
        directory=directory(site, number),
        arguments=arguments,
        parameters_json=json.dumps({"trial": number, "arguments": arguments}).encode(),
        marker=f"contract-{os.getpid()}-{id(site)}.{number}",
        on_start=on_start,
    )
