"""A task's container image is honoured, or the task is refused by name."""

import asyncio
import html
import logging
import subprocess

import pytest
from typer.testing import CliRunner

import loopwright
from loopwright.cli import app
from loopwright.core.outcome import Outcome
from loopwright.execution.sandbox import sandbox_of
from loopwright.execution.sandbox.docker_images import DockerImages, ImageError
from loopwright.reports.rollout.digest import read_rollouts, rollout_result
from loopwright.rollouts.tasks.harbor.check import check_tasks
from loopwright.rollouts.tasks.harbor.source import scan
from tests.rollouts.harbor import write

PLAIN = '[environment]\ndocker_image = "debian:12-slim"\n'
FOREIGN = '[environment]\ndocker_image = "swebench/sweb.eval.x86_64:latest"\n'
RUN = {"environment__Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nRUN echo 42 > made.txt && mkdir /opt/tool\n"}
SCENARIO = """
name = "images"
[[run]]
name = "first"
agent = { type = "collect", trials = TRIALS, group_size = 1, seed = 1 }
engine = { type = "scripted" }
[run.rollout]
tasks = { type = "harbor", path = "tasks" }
loop = { type = "remote", command = ["bash", "-c", "touch done"], deadline_s = 60, sandbox = "SANDBOX" }
judger = { type = "verifier" }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(directory, sandbox, trials):
    (directory / "study.toml").write_text(SCENARIO.replace("SANDBOX", sandbox).replace("TRIALS", str(trials)))
    code = loopwright.dispatch(loopwright.load(directory / "study.toml"), directory / "out")
    with loopwright.Ledger.read(directory / "out/first/ledger.db") as ledger:
        trials = list(ledger.trials())
        return code, trials, ledger.state("run", {})["rollout"]["skipped"]


@pytest.mark.parametrize("sandbox", ["none", "bwrap"])
def test_a06_tasks_that_need_an_image_are_left_out_one_by_one(tmp_path, caplog, sandbox):
    """Each with its reason; the others are attempted."""
    write(tmp_path / "tasks/good")
    write(tmp_path / "tasks/declared", toml=f"{PLAIN}[metadata]\nneeds_image = false\n")
    write(tmp_path / "tasks/plain", toml=PLAIN)
    write(tmp_path / "tasks/foreign", toml=FOREIGN)
    write(tmp_path / "tasks/built", **RUN)
    write(tmp_path / "tasks/based", environment__Dockerfile="FROM swebench/base\n")
    write(tmp_path / "tasks/broken", toml="[agent\n")
    with caplog.at_level(logging.WARNING):
        code, trials, skipped = run(tmp_path, sandbox, 4)
    assert code == 0
    assert {trial.action["task"] for trial in trials} == {"good", "declared"}
    assert skipped["count"] == 5
    assert "environment.docker_image: 'debian:12-slim' needs Docker" in skipped["reasons"]["tasks: plain"]
    assert "swebench/sweb.eval.x86_64:latest" in skipped["reasons"]["tasks: foreign"]
    assert "line 1: the image 'debian:12-slim' needs Docker" in skipped["reasons"]["tasks: built"]
    assert "'swebench/base'" in skipped["reasons"]["tasks: based"]
    assert "broken/task.toml" in skipped["reasons"]["tasks: broken"]
    page = html.unescape((tmp_path / "out/report.html").read_text())
    assert "5 tasks of the sources cannot be attempted here" in page
    assert all(name in page and reason in page for name, reason in skipped["reasons"].items())
    with loopwright.Ledger.read(tmp_path / "out/first/ledger.db") as ledger:
        event, lines = rollout_result(read_rollouts(ledger))
    assert event["skipped_tasks"] == 5
    names = "tasks: based, tasks: broken, tasks: built, tasks: foreign, tasks: plain"
    assert sorted(lines[-1].removeprefix("5 tasks left out: ").split(", ")) == names.split(", ")
    assert "5 tasks are left out; 2 can be attempted" in caplog.text
    plan = CliRunner().invoke(app, ["dry-run", str(tmp_path / "study.toml")]).output
    assert "tasks: 2 tasks, weight 1" in plan
    assert "left out  5 tasks; the first: tasks: " in plan


def test_a06_a_run_without_a_usable_task_does_not_start(tmp_path):
    write(tmp_path / "tasks/broken", toml="not toml")
    write(tmp_path / "tasks/foreign", toml=FOREIGN)
    with pytest.raises(loopwright.ScenarioError, match=r"no task can be attempted: broken: .*; foreign: .*swebench"):
        run(tmp_path, "none", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("docker_daemon")
def test_a06_an_image_is_built_once_and_used_by_agent_and_tests(tmp_path):
    """Its files are in the workspace, and what the agent changes outside of it is there for the tests."""
    test = '[ -f done ] && [ "$(cat made.txt)" = 42 ] && [ -d /opt/tool ] && echo 1 > /logs/verifier/reward.txt'
    write(tmp_path / "tasks/built", test=test, **RUN)
    write(tmp_path / "tasks/named", test=test, toml='[environment]\ndocker_image = "task/named"\nworkdir = "/app"\n')
    subprocess.run(["docker", "build", "-q", "-t", "task/named", tmp_path / "tasks/built/environment"], check=True)
    code, trials, skipped = run(tmp_path, "docker", 4)
    assert (code, skipped["count"]) == (0, 0)
    assert [(trial.outcome, trial.reward and trial.reward.value) for trial in trials] == [(Outcome.OK, 1.0)] * 4
    listing = ["docker", "image", "ls", "--format", "{{.Repository}}"]
    images = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    assert images.count("loopwright-task") == 1
    assert "loopwright-state" not in images
    assert subprocess.run(["docker", "ps", "-aq"], capture_output=True, check=True).stdout == b""


@pytest.mark.slow
@pytest.mark.usefixtures("docker_daemon")
def test_a06_tests_see_what_a_solution_installed_and_an_agent_cannot_remove_their_shell(tmp_path):
    test = 'if tool; then echo 1; else echo 0; fi > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    install = "printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/tool; chmod +x /usr/bin/tool"
    write(tmp_path / "set/good", test=test, solution__solve_sh="", **RUN)
    write(tmp_path / "set/bad", test=test, **RUN)
    for name, script in {"good": install, "bad": "rm -f /bin/bash /usr/bin/bash"}.items():
        (tmp_path / f"set/{name}/solution").mkdir(exist_ok=True)
        (tmp_path / f"set/{name}/solution/solve.sh").write_text(f"#!/bin/bash\n{script}\n")

    async def main():
        checks = check_tasks(list(scan(tmp_path / "set")), sandbox_of("docker"), jobs=2)
        return {check.directory.id: check async for check in checks}

    checks = asyncio.run(main())
    assert checks["good"].solved["rewards"] == {"reward": 1.0}
    assert checks["good"].initial["rewards"] == {"reward": 0.0}
    assert checks["bad"].solved["is_forfeit"]


@pytest.mark.slow
@pytest.mark.usefixtures("docker_daemon")
def test_a06_an_image_that_cannot_be_had_is_named(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:12-slim\nRUN echo broken; exit 7\n")
    with pytest.raises(ImageError, match=r"(?s)Dockerfile cannot be built.*returned a non-zero code: 7"):
        DockerImages().build(tmp_path, "0")
    with pytest.raises(ImageError, match=r"image nobody/nothing:1 cannot be pulled"):
        DockerImages().pull("nobody/nothing:1")
