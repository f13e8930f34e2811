"""The contracts S16 and S17: exit statuses, failure files, and signals inside an agent's own loop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.reports import page
from tests.contracts.harness import campaign, resumed, scenario, trials

AGENTS = """
import asyncio
import os
import sys
import time
from pathlib import Path

from loopwright import Agent

HERE = Path(__file__).parent

def log(event):
    with (HERE / "events").open("a") as file:
        file.write(f"{event}\\n")

class OwnLoop(Agent):
    def run(self):
        log("run")
        asyncio.run(self.trial())
        return self.end()

    async def trial(self):
        async with self.env.running():
            await self.env.step({"x": 1})

    def end(self):
        return 0

    def shutdown(self):
        log("shutdown")

class System(OwnLoop):
    def end(self):
        return os.system("exit 1")

class Negative(OwnLoop):
    def end(self):
        return -1

class Exits(OwnLoop):
    def end(self):
        sys.exit(0)

class ExitsEarly(OwnLoop):
    def __init__(self, *args, **options):
        sys.exit(0)

class Buggy(OwnLoop):
    def end(self):
        if (HERE / "fixed").exists():
            return 0
        raise ZeroDivisionError("a bug in the agent")

class Sleeps(OwnLoop):
    def end(self):
        try:
            while True:
                try:
                    (HERE / "asleep").touch()
                    time.sleep(600)
                except Exception:
                    continue  # a loop that survives everything
        finally:
            log(sys.exc_info()[0].__name__)

class Stubborn(Sleeps):
    def end(self):
        while True:
            try:
                super().end()
            except BaseException:
                continue
"""
ECHO = "echo y={x}"


@pytest.fixture
def agents(tmp_path):
    name = f"agents_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(AGENTS)
    return name


def study(agents, kind, *, second=True):
    first = scenario(f'{{ type = "{agents}:{kind}" }}', ECHO, {"x": "[1, 2]"})
    rest = scenario('{ type = "grid" }', ECHO, {"x": "[1, 2]"}).partition("[[run]]")[2].replace('"r"', '"s"')
    return f"{first}\n[[run]]{rest}" if second else first


def state(directory, key):
    with Ledger.read(directory / "out" / "r" / "ledger.db") as ledger:
        return ledger.state(key)


@pytest.mark.parametrize("kind", ["System", "Negative", "Exits"])
def test_s16_any_code_and_any_exit_fails_its_run_and_the_next_one_starts(tmp_path, agents, kind):
    code = campaign(tmp_path, study(agents, kind))
    assert code == 1, "what a shell sees is not 0"
    assert len(trials(tmp_path, "s")) == 2
    assert (tmp_path / "events").read_text().split() == ["run", "shutdown"]
    if kind == "Exits":
        assert "SystemExit: 0" in state(tmp_path, "failure")
        assert "SystemExit: 0" in (tmp_path / "out/report.html").read_text()


def test_s16_an_exit_while_a_run_is_built_fails_that_run(tmp_path, agents):
    assert campaign(tmp_path, study(agents, "ExitsEarly")) == 1
    assert len(trials(tmp_path, "s")) == 2


def test_s16_a_report_that_fails_hides_no_error(tmp_path, agents, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("a bug in the report")

    monkeypatch.setattr(page, "write_report", fail)
    with pytest.raises(ZeroDivisionError, match="a bug in the agent"):
        campaign(tmp_path, study(agents, "Buggy"))
    assert "a bug in the report" in caplog.text
    monkeypatch.setattr(page, "read_runs", fail)
    assert campaign(tmp_path, study(agents, "OwnLoop", second=False), "other") == 1


def test_s16_no_failure_file_remains_after_a_successful_resume(tmp_path, agents):
    with pytest.raises(ZeroDivisionError):
        campaign(tmp_path, study(agents, "Buggy", second=False))
    assert (tmp_path / "out/dse_failure.txt").exists()
    (tmp_path / "fixed").touch()
    assert resumed(tmp_path) == 0
    assert not (tmp_path / "out/dse_failure.txt").exists()
    assert state(tmp_path, "failure") is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_s17_a_signal_is_raised_inside_an_agents_own_loop(tmp_path, agents, number, code):
    def interrupt():
        while not (tmp_path / "asleep").exists():
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert campaign(tmp_path, study(agents, "Sleeps")) == code
    thread.join()
    assert (tmp_path / "events").read_text().split() == ["run", "RunStopped", "shutdown"]
    assert [row.outcome for row in trials(tmp_path)] == [Outcome.OK]
    assert not (tmp_path / "out/s").exists(), "no further run starts"
    assert (tmp_path / "out/report.html").exists()
    assert not (tmp_path / "out/dse_failure.txt").exists(), "a stop is not a bug"


def test_s17_the_second_signal_leaves_a_readable_ledger(tmp_path, agents):
    (tmp_path / "scenario.toml").write_text(study(agents, "Stubborn"))
    command = [sys.executable, "-m", "loopwright", "run", "scenario.toml", "-o", "out", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        for count in (0, 1):
            while (tmp_path / "events").exists() < 1 or text(tmp_path).count("RunStopped") < count:
                assert process.poll() is None
            while not (tmp_path / "asleep").exists():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    assert [row.outcome for row in trials(tmp_path)] == [Outcome.OK]
    assert "shutdown" not in text(tmp_path)


def text(directory):
    return (directory / "events").read_text()
