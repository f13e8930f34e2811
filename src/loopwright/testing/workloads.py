"""What every workload promises, as tests, and a workload in process for testing everything else.

    class TestMine(WorkloadContract):
        def make_workload(self, site: Site, story: Story, **settings: Any) -> Workload:
            return Mine(MineConfig(script=SCRIPTS[story], **settings), site)

The stories are what a trial does; each gets one argument, `value`, a string.
"""
# ruff: noqa: S101  These are tests, wherever they stand.

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
from loopwright.execution.local.processes import start_ticks
from loopwright.testing.executors import alive, appears, ignore, written_pid
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig

T = TypeVar("T")
Story = Literal["measure", "crash", "hang", "forget"]
"""`measure`: write `value` as it came into the file `seen` of the working directory, as UTF-8, and give the metric
`length`, its number of characters. `crash`: fail. `hang`: write the process id and a newline into the file `pid` of the
working directory, then never end. `forget`: end well, without the metric `length`."""
_DEADLINE_S = 60.0

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
"""Values that a shell, a template or a careless split would mistake for something else."""


class FunctionWorkload(Workload):
    """Calls a function in this process: a fake for tests of agents and environments, since nothing here can be killed.

        FunctionWorkload(lambda x: {"y": x * x}, site)

    The function gives metrics, or a Result, or raises, which is a crash; it may be asynchronous.
    """

    def __init__(self, function: Callable[..., Any], site: Site) -> None:
        super().__init__(WorkloadConfig(type="function"), site)
        self.function = function

    async def run(self, job: Job) -> Result:
        try:
            given = self.function(**job.arguments)
            if inspect.isawaitable(given):
                given = await given
        except Exception as error:  # noqa: BLE001  Whatever a test's function raises is its trial's crash.
            return Result(Outcome.CRASHED, reason=repr(error))
        return given if isinstance(given, Result) else Result(Outcome.OK, given)


class WorkloadContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a workload for each story."""

    @abstractmethod
    def make_workload(
        self, site: Site, story: Story, *, timeout_s: float | None = None, files: tuple[str, ...] = ()
    ) -> Workload:
        """A workload whose trials do what `story` says, and which requires the metric `length`."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        """A scenario's directory, a run's directory, and little patience with what does not end."""
        home = tmp_path / "home"
        home.mkdir()
        return Site(scenario_dir=home, directory=tmp_path / "run", parallel=2, grace_s=0.1)

    def use(self, workload: Workload, story: Callable[[Workload], Awaitable[T]]) -> T:
        """Run `story` with a workload in an event loop, and close it."""

        async def main() -> T:
            workload.open()
            try:
                return await asyncio.wait_for(story(workload), _DEADLINE_S)
            finally:
                await workload.close()

        return asyncio.run(main())

    def run(self, workload: Workload, value: str = "abc") -> Result:
        """Run one job to its end."""
        return self.use(workload, lambda workload: workload.run(job(workload.site, value)))

    def test_a_good_trial_is_ok_with_its_metrics_and_usage(self, site: Site) -> None:
        """Given a trial that succeeds, the result says so, what was measured and what it used."""
        result = self.run(self.make_workload(site, "measure"))
        assert (result.outcome, result.fault, dict(result.metrics)) == (Outcome.OK, None, {"length": 3})
        assert result.usage["wall_s"] > 0

    def test_a_failure_is_a_result(self, site: Site) -> None:
        """A crash is data, with a reason and without metrics."""
        result = self.run(self.make_workload(site, "crash"))
        assert (result.outcome, result.fault, dict(result.metrics)) == (Outcome.CRASHED, Fault.WORKLOAD, {})
        assert result.reason

    def test_a_metric_that_is_not_there_is_named(self, site: Site) -> None:
        """Ending well is not enough."""
        result = self.run(self.make_workload(site, "forget"))
        assert (result.outcome, result.fault) == (Outcome.METRIC_MISSING, Fault.WORKLOAD)
        assert "length" in result.reason

    def test_a_trial_that_takes_too_long_is_ended(self, site: Site) -> None:
        """After the time-out its process is gone and the outcome says why."""
        known: list[int] = []
        hanging = job(site, on_start=lambda pid, _: known.append(pid))
        workload = self.make_workload(site, "hang", timeout_s=0.3)
        result = self.use(workload, lambda workload: workload.run(hanging))
        assert (result.outcome, result.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
        assert known
        assert not any(map(alive, known))

    def test_cancelling_ends_the_process(self, site: Site) -> None:
        """A trial that is aborted leaves nothing running, and the workload goes on working."""

        async def story(workload: Workload) -> None:
            flight = asyncio.ensure_future(workload.run(job(site)))
            await appears(directory(site) / "pid")
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            assert not alive(written_pid(directory(site) / "pid"))

        self.use(self.make_workload(site, "hang"), story)

    def test_killing_ends_the_process(self, site: Site) -> None:
        """`kill` is for a second signal: at once, and from outside of the event loop's tasks."""

        async def story(workload: Workload) -> Result:
            flight = asyncio.ensure_future(workload.run(job(site)))
            await appears(directory(site) / "pid")
            workload.kill()
            return await flight

        assert self.use(self.make_workload(site, "hang"), story).outcome is Outcome.CRASHED
        assert not alive(written_pid(directory(site) / "pid"))

    def test_the_process_is_made_known_before_it_can_be_orphaned(self, site: Site) -> None:
        """`started` gets a process id and its start time, by which a resumed run recognises it."""
        known: list[tuple[int, int]] = []

        def record(pid: int, ticks: int) -> None:
            assert start_ticks(pid) == ticks
            known.append((pid, ticks))

        workload = self.make_workload(site, "measure")
        self.use(workload, lambda workload: workload.run(job(site, on_start=record)))
        assert known
        assert os.getpid() not in [pid for pid, _ in known]

    @pytest.mark.parametrize("value", HOSTILE, ids=repr)
    def test_a_value_stays_a_value(self, site: Site, value: str) -> None:
        """Whatever it holds, it arrives as it is, and nothing of it is ever run."""
        assert self.run(self.make_workload(site, "measure"), value).outcome is Outcome.OK
        assert (directory(site) / "seen").read_bytes().decode() == value
        assert not list(site.scenario_dir.parent.rglob("*broken*"))

    def test_each_trial_has_a_directory_of_its_own(self, site: Site) -> None:
        """Trials in flight at the same time do not meet."""

        async def story(workload: Workload) -> list[Result]:
            return await asyncio.gather(*(workload.run(job(site, "x" * number, number)) for number in (1, 2, 3)))

        results = self.use(self.make_workload(site, "measure"), story)
        assert [result.metrics["length"] for result in results] == [1, 2, 3]
        assert [(directory(site, number) / "seen").read_text() for number in (1, 2, 3)] == ["x", "xx", "xxx"]

    def test_the_directory_keeps_the_parameters(self, site: Site) -> None:
        """What was asked is there for whoever looks for it later."""
        self.run(self.make_workload(site, "measure"), "abc")
        assert json.loads((directory(site) / "parameters.json").read_bytes())["arguments"] == {"value": "abc"}

    def test_inputs_stand_in_the_directory(self, site: Site) -> None:
        """Files of the scenario are found under their own relative names."""
        (site.scenario_dir / "data").mkdir()
        (site.scenario_dir / "data" / "in.txt").write_text("input")
        assert self.run(self.make_workload(site, "measure", files=("data/in.txt",))).outcome is Outcome.OK
        assert (directory(site) / "data" / "in.txt").read_text() == "input"

    def test_a_changed_input_is_another_question(self, site: Site) -> None:
        """The fingerprint covers the contents of the inputs."""
        (site.scenario_dir / "in.txt").write_text("one")
        one, same = (self.make_workload(site, "measure", files=("in.txt",)).fingerprint() for _ in range(2))
        (site.scenario_dir / "in.txt").write_text("two")
        assert one == same != self.make_workload(site, "measure", files=("in.txt",)).fingerprint()

    def test_another_attempt_starts_in_a_clean_directory(self, site: Site) -> None:
        """What an interrupted attempt left is moved aside, neither mixed in nor lost."""
        directory(site).mkdir(parents=True)
        (directory(site) / "half-written").write_text("…")
        assert self.run(self.make_workload(site, "measure")).outcome is Outcome.OK
        assert not (directory(site) / "half-written").exists()
        assert list(site.directory.rglob("half-written"))


def directory(site: Site, number: int = 1) -> Path:
    """Where a trial of the suite keeps its output."""
    return site.directory / "trials" / str(number)


def job(site: Site, value: str = "abc", number: int = 1, on_start: Callable[[int, int], None] = ignore) -> Job:
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
