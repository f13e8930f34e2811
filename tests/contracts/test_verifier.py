"""Contracts of what judges an agent: A08."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from loopwright.execution.sandbox import Bounds, links, sandbox_of
from tests.rollouts.harbor import run_verifier, write

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
GRADE = 'then echo 1; else echo 0; fi > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
DIFF = f'if diff -q "$LOOPWRIGHT_TESTS_DIR/expected.txt" answer.txt; {GRADE}'
HARBOR_DIFF = f"if diff -q /tests/expected.txt answer.txt; {GRADE}"
JSON = f"if python3 -c 'import json, sys; sys.exit(json.load(open(\"answer.json\")) != [4, 2])'; {GRADE}"
EXPECTED = {"tests__expected.txt": "42\n"}


def available(name):
    if name == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    return sandbox_of(name)


DOCKER = pytest.param("docker", marks=pytest.mark.slow)


@pytest.fixture(params=["bwrap", DOCKER])
def isolating(request):
    if request.param == "docker":
        request.getfixturevalue("docker_daemon")
    return available(request.param)


@pytest.fixture(params=["none", "bwrap", DOCKER])
def sandbox(request):
    if request.param == "docker":
        request.getfixturevalue("docker_daemon")
    return available(request.param)


def report(path, home, **given):
    return asyncio.run(asyncio.wait_for(run_verifier(path, home, **given), 60))


@pytest.mark.parametrize(
    "trick",
    [
        "ln -s /tests/expected.txt answer.txt",
        "ln -s ../../../../../../../../tests/expected.txt answer.txt",
        "ln -s /tests tests; ln -s tests/expected.txt answer.txt",
        "mkdir deep; ln -s deep/answer.txt answer.txt; ln -s /tests/expected.txt deep/answer.txt; chmod 0300 deep",
        "ln -s /tests/expected.txt /tmp/$$; ln -s /tmp/$$ answer.txt",
        "ln -s /usr/share/$$ answer.txt; ln -s /tests/expected.txt /usr/share/$$ || ln -fs /tests answer.txt",
        "ln -s /proc/1/root/tests/expected.txt answer.txt",
    ],
)
def test_a08_a_link_into_the_tests_is_not_an_answer(tmp_path, isolating, trick):
    """Even for tests that need Harbor's own path, so that an agent knows where they will be."""
    path = write(tmp_path / "task", test=HARBOR_DIFF, **EXPECTED)
    done = report(path, tmp_path, sandbox=isolating, agent=trick)
    assert done["rewards"] == {"reward": 0.0}
    # With Docker, each command has a new /usr, and the link there leads nowhere.
    assert {*done.get("removed_links", ())} & {"/app/answer.txt", "/app/deep/answer.txt"} or "/usr" in trick


def test_a08_without_isolation_a_link_into_the_task_is_not_an_answer(tmp_path):
    path = write(tmp_path / "task", test=DIFF, **EXPECTED)
    done = report(path, tmp_path, agent=f"ln -s {path}/tests/expected.txt answer.txt")
    assert done["rewards"] == {"reward": 0.0}
    assert done["removed_links"] == [str(tmp_path / "workspace/answer.txt")]


def test_a08_links_in_the_workspace_and_to_the_system_stay(tmp_path, sandbox):
    """A virtual environment has both."""
    path = write(tmp_path / "task", test=f"{DIFF}; venv/bin/sh -c 'exit 3' || echo $?", **EXPECTED)
    agent = "echo 42 > real.txt; ln -s real.txt answer.txt; mkdir -p venv/bin; ln -s /bin/sh venv/bin/sh"
    done = report(path, tmp_path, sandbox=sandbox, agent=agent)
    assert (done["rewards"], done["output"]) == ({"reward": 1.0}, "3")
    assert "removed_links" not in done


def test_a08_files_that_cannot_be_inspected_in_time_score_zero(tmp_path, monkeypatch):
    """Not "no reward": an agent could leave them to avoid a zero."""
    monkeypatch.setattr(links, "_TIMEOUT_S", -1.0)
    path = write(tmp_path / "task", test=DIFF, **EXPECTED)
    done = report(path, tmp_path, agent="echo 42 > answer.txt; ln -s answer.txt other")
    assert done["rewards"] == {"reward": 0.0}
    assert "could not be inspected" in done["output"]


@pytest.mark.parametrize(
    "trick",
    [
        "chmod 000 /app",
        "rm -rf /usr/bin || chmod 000 /app",
        "rm -f /usr/bin/bash",
    ],
)
def test_a05_an_agent_that_keeps_its_tests_from_running_scores_zero(tmp_path, trick):
    """Not "lost" and not "judge failed", which would be somebody else's fault."""
    path = write(tmp_path / "task", test=DIFF, **EXPECTED)
    done = report(path, tmp_path, sandbox=available("bwrap"), agent=trick)
    assert done["rewards"] == {"reward": 0.0}


WAITING = {
    "mkfifo answer.txt": "the pipe /app/answer.txt",
    "truncate -s 10T answer.txt": "the sparse file /app/answer.txt",
    "mkfifo /tmp/pipe": "the pipe /tmp/pipe",
}


@pytest.mark.parametrize("trick", WAITING)
def test_a05_an_answer_that_keeps_its_tests_waiting_scores_zero(tmp_path, isolating, trick):
    """A pipe without a writer or a file without end: the tests do not finish, and that is the agent's fault."""
    toml = "[verifier]\ntimeout_sec = 3.0\n"
    test = f'if [ "$(tr -d "\\0" < answer.txt; cat /tmp/pipe)" = 42 ]; {GRADE}'
    done = report(write(tmp_path / "task", toml=toml, test=test, **EXPECTED), tmp_path, sandbox=isolating, agent=trick)
    assert done["rewards"] == {"reward": 0.0}
    assert done["is_forfeit"]
    assert f"test.sh was stopped after 3 s; the agent left {WAITING[trick]}" in done["output"]
    assert "stopped" not in done


def test_a05_a_huge_answer_does_not_exhaust_the_memory_of_its_tests(tmp_path):
    """Given tests that read all of it, their memory bound ends them, and the agent gets a zero."""
    test = "python3 -c 'open(\"answer.txt\").read()' || exit 1"
    path = write(tmp_path / "task", test=test)
    sandbox = sandbox_of("bwrap", Bounds(memory_bytes=256 << 20)) if available("bwrap") else None
    done = report(path, tmp_path, sandbox=sandbox, agent="truncate -s 1T answer.txt")
    assert done["rewards"] == {"reward": 0.0}
    assert "the sparse file /app/answer.txt" in done["output"]


def test_a05_a_pipe_that_the_task_asks_for_is_scored_by_its_tests(tmp_path, sandbox):
    path = write(tmp_path / "task", test=f"if [ -p queue ]; {GRADE}")
    assert report(path, tmp_path, sandbox=sandbox, agent="mkfifo queue")["rewards"] == {"reward": 1.0}


def test_a05_tests_that_hang_without_a_cause_in_the_workspace_are_no_zero(tmp_path, sandbox):
    """A pipe that the tests make themselves is not the agent's."""
    path = write(tmp_path / "task", toml="[verifier]\ntimeout_sec = 2.0\n", test="mkfifo pipe; cat pipe")
    done = report(path, tmp_path, sandbox=sandbox, agent="echo 42 > answer.txt")
    assert done["error"] == "test.sh was stopped after 2 s"
    assert done["stopped"]


def test_a05_tests_that_are_broken_without_the_agent_are_no_zero(tmp_path):
    path = write(tmp_path / "task", test="exit 3")
    done = report(path, tmp_path, sandbox=available("bwrap"), agent="python3 -c 'import json'; echo 42 > answer.txt")
    assert "left neither" in done["error"]


@pytest.mark.parametrize("length", [195, 198, 200])
def test_a08_a_link_too_deep_to_be_found_is_removed(tmp_path, isolating, length):
    """Given a path that is too long outside but not inside, a link at its end is still no way to the tests."""
    path = write(tmp_path / "task", test=HARBOR_DIFF, **EXPECTED)
    name = "n" * length
    agent = f"""
        deep=""; i=0
        while [ $i -lt 20 ]; do mkdir {name}; cd {name}; deep="$deep{name}/"; i=$((i+1)); done
        ln -s /tests/expected.txt end
        cd /app; ln -s "${{deep}}end" answer.txt; cat answer.txt 2>&1 | grep -q "No such" && touch reached
    """
    done = report(path, tmp_path, sandbox=isolating, agent=agent)
    assert (tmp_path / "workspace/reached").exists(), "inside, the link leads to where the tests will be"
    assert done["rewards"] == {"reward": 0.0}
    links_left = subprocess.run(["find", tmp_path / "workspace", "-type", "l"], capture_output=True, check=True)
    assert links_left.stdout == b""


def test_a08_a_module_in_the_workspace_is_not_imported_by_the_tests(tmp_path, sandbox):
    path = write(tmp_path / "task", test=JSON)
    agent = "echo '[]' > answer.json; echo 'load = lambda _: [4, 2]' > json.py"
    assert report(path, tmp_path, sandbox=sandbox, agent=agent)["rewards"] == {"reward": 0.0}


def test_a08_tests_import_their_own_modules(tmp_path, sandbox):
    test = f'if python3 "$LOOPWRIGHT_TESTS_DIR/main.py"; {GRADE}'
    path = write(tmp_path / "task", test=test, **{"tests__main.py": "import helper", "tests__helper.py": ""})
    assert report(path, tmp_path, sandbox=sandbox)["rewards"] == {"reward": 1.0}


@pytest.mark.parametrize(
    "trick", ["ln -s config backup", "cp -al config backup", "rm -r config/*; cp -r config backup"]
)
def test_a08_a_link_is_not_a_copy(tmp_path, sandbox, trick):
    shutil.copytree(TASKS / "eval/copy-tree", tmp_path / "task")
    assert report(tmp_path / "task", tmp_path, sandbox=sandbox, agent=trick)["rewards"] == {"reward": 0.0}


def test_a08_the_path_of_tests_is_never_the_same(tmp_path, isolating):
    """Unless they name Harbor's paths, which are there then."""
    show = 'echo "$LOOPWRIGHT_TESTS_DIR $LOOPWRIGHT_VERIFIER_DIR"; ls -d /test? /log?'
    outputs = []
    for number, test in enumerate([show, show, f"{show}; cat /tests/test.sh > /logs/verifier/copy"]):
        home = tmp_path / str(number)
        path = write(home / "task", test=f'{test}\necho 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"')
        outputs.append(report(path, home, sandbox=isolating)["output"])
    first, second, named = outputs
    assert first.split()[0] != second.split()[0]
    assert {Path(word).parent.name for word in first.split()[:2]} != {"tests", "logs"}
    assert "cannot access '/test?'" in first
    assert named.split() == ["/tests", "/logs/verifier", "/logs", "/tests"]


def test_a08_unreadable_directories_keep_their_modes(tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/link").symlink_to("/nowhere")
    (tmp_path / "closed").chmod(0o100)

    async def main():
        async with sandbox_of("none").open(tmp_path) as instance:
            return links.remove_outward_links(instance)

    assert asyncio.run(main()) == [str(tmp_path / "closed/link")]
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o100
    (tmp_path / "closed").chmod(0o700)
    assert list((tmp_path / "closed").iterdir()) == []
