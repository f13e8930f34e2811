"""The verifier: rewards of a task's tests, and broken tests, which give none."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault
from loopwright.core.trial import Reward
from loopwright.execution.sandbox import NoSandbox, sandbox_of
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.judgers.composed import ComposedJudgerConfig
from loopwright.rollouts.judgers.facts import VerifierJudger, VerifierJudgerConfig
from loopwright.rollouts.judgers.ranking import RankingJudgerConfig
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.verify import prepare
from loopwright.rollouts.tasks.harbor.reward import BrokenTests, read_rewards
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import TaskChanged, directory_digest, resolve_env
from loopwright.rollouts.tasks.sources import TasksError
from loopwright.testing.executors import alive
from tests.rollouts.harbor import PASS, run_verifier, task_at, write
from tests.rollouts.remote.agents import open_setup, program

NEEDS_BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
REWARD = 'cat > "$LOOPWRIGHT_VERIFIER_DIR/reward.json" <<< '


def judge(report, **settings):
    config = VerifierJudgerConfig(**settings)
    payload = Payload.of(Episode(task_at("x"), evidence={"verifier": report} if report else {}), ("evidence",))
    return asyncio.run(VerifierJudger(config, None).judge(payload))


def run_tests(tmp_path, test, **files):
    return asyncio.run(run_verifier(write(tmp_path / "task", test=test, **files), tmp_path))


def test_reward_txt_is_one_number(tmp_path):
    report = run_tests(tmp_path, 'echo checking; echo 0.25 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"')
    assert (report["rewards"], report["exit_code"], report["output"]) == ({"reward": 0.25}, 0, "checking")
    assert report["seconds"] >= 0
    assert judge(report) == Reward(0.25, {"reward": 0.25})


def test_reward_json_is_named_numbers_and_comes_first(tmp_path):
    report = run_tests(
        tmp_path, f"""{REWARD} '{{"style": 0.5, "tests": 2}}'; echo 7 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" """
    )
    assert report["rewards"] == {"style": 0.5, "tests": 2.0}
    assert judge(report) == Reward(2.5, {"style": 0.5, "tests": 2.0})
    assert judge(report, reward="tests").value == 2.0
    with pytest.raises(JudgeFailed, match="no reward 'speed', only style, tests"):
        judge(report, reward="speed")


@pytest.mark.parametrize(
    ("json_text", "number", "rewards"),
    [
        ('{"reward": 1}', "0", {"reward": 0.0}),
        ('{"reward": 0}', "1", {"reward": 0.0}),
        ('{"a": 1, "b": 1}', "0.5", {"a": 1.0, "b": 1.0, "reward": 0.5}),
        ('{"reward": 1', "0", {"reward": 0.0}),
        ('{"reward": 0}', "one", {"reward": 0.0}),
    ],
)
def test_the_lower_of_two_rewards_counts_and_a_broken_one_does_not(tmp_path, json_text, number, rewards):
    """The agent may have written one of them; it must not raise its reward or remove it."""
    report = run_tests(tmp_path, f"""{REWARD} '{json_text}'; echo {number} > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" """)
    assert report["rewards"] == rewards


def test_a_reward_that_is_a_directory_leaves_no_file_open(tmp_path):
    (tmp_path / "reward.json").mkdir()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(BrokenTests, match="not a regular file"):
            read_rewards(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_part_called_reward_is_the_reward(tmp_path):
    assert judge(run_tests(tmp_path, f"""{REWARD} '{{"reward": 1, "lines": 40}}'""")).value == 1.0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (f"{REWARD} '{{\"reward\": NaN}}'", "not JSON"),
        (f"{REWARD} '{{\"reward\": 1e999}}'", "not JSON|not a finite number"),
        (f"{REWARD} '{{\"reward\": true}}'", "not a finite number"),
        (f'{REWARD} \'{{"reward": "1"}}\'', "not a finite number"),
        (f'{REWARD} \'{{"reward": {{"a": 1}}}}\'', "not a finite number"),
        (f"{REWARD} '{{}}'", "without named numbers"),
        (f"{REWARD} '1'", "without named numbers"),
        (f"{REWARD} '{{\"reward\": 1'", "not JSON"),
        ('echo nan > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "not a finite number"),
        ('echo inf > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "not a finite number"),
        ('echo good > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "not a number"),
        ('touch "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "not a number"),
        ('yes | head -c 100000 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "too large"),
        ('mkfifo "$LOOPWRIGHT_VERIFIER_DIR/reward.json"', "not a regular file"),
        ('ln -s /etc/hostname "$LOOPWRIGHT_VERIFIER_DIR/reward.json"', "cannot be read"),
        ("echo oops >&2; exit 3", "neither reward.json nor reward.txt"),
        ("kill -SEGV $$", "SIGSEGV"),
    ],
)
def test_broken_tests_give_no_reward_and_never_zero(tmp_path, test, message):
    report = run_tests(tmp_path, test)
    assert "rewards" not in report
    with pytest.raises(JudgeFailed, match=message):
        judge(report)


def test_a_reward_counts_whatever_the_exit_code(tmp_path):
    report = run_tests(tmp_path, 'echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; exit 1')
    assert (report["rewards"], report["exit_code"]) == ({"reward": 0.0}, 1)


def test_tests_that_never_end_are_stopped_with_all_their_processes(tmp_path):
    toml = "[verifier]\ntimeout_sec = 0.5\n"
    test = 'echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; setsid sleep 1000 & echo $! > ../pid; sleep 1000'
    report = asyncio.run(run_verifier(write(tmp_path / "task", toml=toml, test=test), tmp_path))
    assert report["error"] == "test.sh was stopped after 0.5 s"
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(JudgeFailed, match=r"stopped after 0\.5 s"):
        judge(report)
    assert judge(report, broken=0.0) == Reward(0.0, {"verifier": 0.0})


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bwrap", marks=NEEDS_BWRAP)])
@pytest.mark.parametrize("crash", ["exit 139", "bash -c 'kill -SEGV $$'", "kill -KILL $$"])
def test_a_crash_does_not_discard_the_reward(tmp_path, sandbox, crash):
    """Many tests run the agent's program last; it must not avoid a zero by crashing."""
    test = f'echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; {crash}'
    report = asyncio.run(run_verifier(write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of(sandbox)))
    assert judge(report) == Reward(0.0, {"reward": 0.0})


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bwrap", marks=NEEDS_BWRAP)])
def test_a_crash_without_a_reward_names_the_signal(tmp_path, sandbox):
    report = asyncio.run(run_verifier(write(tmp_path / "task", test="exit 139"), tmp_path, sandbox=sandbox_of(sandbox)))
    with pytest.raises(JudgeFailed, match=r"SIGSEGV.* left neither"):
        judge(report)
    assert judge(report, broken=0.0).value == 0.0


def test_broken_applies_to_steps(tmp_path):
    toml = '[verifier]\ntimeout_sec = 0.5\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two")}
    files = {**steps, "steps__two__workdir__late": ""}
    path = write(tmp_path / "task", toml=toml, test=f"[ ! -e late ] || sleep 1000\n{PASS}", **files)
    report = asyncio.run(run_verifier(path, tmp_path))
    assert report["error"].startswith("step two: test.sh was stopped after")
    assert judge(report, broken=0.0).value == 0.0


def test_broken_applies_to_stopped_tests_only(tmp_path):
    with pytest.raises(JudgeFailed, match="neither"):
        judge(run_tests(tmp_path, "exit 1"), broken=0.0)


def test_without_tests_there_is_no_reward():
    with pytest.raises(JudgeFailed, match="no tests were run"):
        judge(None)


def test_the_workspace_starts_with_the_files_of_the_environment(tmp_path):
    test = '[ "$(cat sub/data.txt)" = hello ] && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    assert run_tests(tmp_path, test, environment__sub__data=".", **{"environment__sub__data.txt": "hello\n"})["rewards"]


def test_tests_run_from_copies_that_are_deleted(tmp_path):
    test = 'echo spoiled > "$LOOPWRIGHT_TESTS_DIR/helper.txt"; cat "$LOOPWRIGHT_TESTS_DIR/helper.txt"; exit 1'
    report = run_tests(tmp_path, test, **{"tests__helper.txt": "original"})
    assert report["output"] == "spoiled"
    assert (tmp_path / "task/tests/helper.txt").read_text() == "original"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task", "workspace"]


def test_the_workspace_contains_no_tests_while_the_agent_works(tmp_path):
    listing = []
    path = write(tmp_path / "task", **{"environment__a.txt": "a", "solution__solve.sh": "echo"})
    asyncio.run(run_verifier(path, tmp_path, lambda workspace: listing.extend(workspace.rglob("*"))))
    assert [file.name for file in listing] == ["a.txt"]


def test_tests_get_the_variables_of_the_environment_and_of_the_verifier(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN", "ours")
    monkeypatch.setenv("SECRET", "hidden")
    toml = '[environment.env]\nA = "1"\nB = "${OWN}"\n[verifier.env]\nC = "${NONE:-c}"\n'
    report = asyncio.run(run_verifier(write(tmp_path / "task", toml=toml, test='echo "$A $B $C [$SECRET]"'), tmp_path))
    assert report["output"] == "1 ours c []"


def test_an_unset_variable_is_named(tmp_path):
    path = write(tmp_path / "task", toml='[environment.env]\nA = "${NOWHERE}"\n')
    with pytest.raises(TasksError, match=r"task\.toml: environment\.env needs the environment variable NOWHERE"):
        prepare(task_at(path), tmp_path, TaskLocator(tmp_path), NoSandbox())


def test_an_unset_variable_of_the_tests_is_found_before_the_agent_starts(tmp_path):
    path = write(tmp_path / "task", toml='[verifier.env]\nA = "${NOWHERE}"\n')
    message = r"task\.toml: verifier\.env needs the environment variable NOWHERE, which is not set"
    with pytest.raises(TasksError, match=message):
        prepare(task_at(path), tmp_path, TaskLocator(tmp_path), NoSandbox())
    assert prepare(task_at(path), tmp_path, TaskLocator(tmp_path), NoSandbox(), run_tests=False).tests_env == {}
    assert re.search(message, RemoteConfig(command=("agent",)).task_problem(task_at(path), tmp_path))


def test_only_whole_values_are_variable_references(monkeypatch):
    """As in Harbor."""
    monkeypatch.setenv("OWN", "ours")
    values = {"A": "${OWN}", "B": "${OWN}/bin", "C": "${NONE:-a}b}", "D": "$OWN"}
    assert resolve_env(values, "here") == {"A": "ours", "B": "${OWN}/bin", "C": "a}b", "D": "$OWN"}


def test_python_caches_are_not_part_of_a_task_but_a_repository_is(tmp_path):
    path = write(tmp_path / "task", test=f'find . "$LOOPWRIGHT_TESTS_DIR" -name "*.pyc" -o -name HEAD; {PASS}')
    for name in ("tests/sub/__pycache__/a.pyc", "environment/__pycache__/a.pyc", "environment/.git/HEAD"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("x")
    digest = directory_digest(path)
    assert asyncio.run(run_verifier(path, tmp_path))["output"] == "./.git/HEAD"
    next(path.rglob("*.pyc")).write_text("y")
    assert directory_digest(path) == digest
    (path / "environment/.git/HEAD").write_text("y")
    assert directory_digest(path) != digest


def test_a_task_that_changed_since_it_was_loaded_is_refused(tmp_path):
    path = write(tmp_path / "task")
    prepared = prepare(task_at(path), tmp_path, TaskLocator(tmp_path), NoSandbox())
    loaded_task = task_at(path, task_hash=prepared.task.digest)
    assert prepare(loaded_task, tmp_path, TaskLocator(tmp_path), NoSandbox()) == prepared
    (path / "tests/test.sh").write_text("exit 0")
    with pytest.raises(TaskChanged, match="has changed since its tasks were loaded"):
        prepare(loaded_task, tmp_path, TaskLocator(tmp_path), NoSandbox())


def test_a_task_that_changes_while_the_agent_works_gives_no_reward(tmp_path):
    path = write(tmp_path / "task")
    report = asyncio.run(run_verifier(path, tmp_path, lambda _: (path / "tests/more.sh").write_text("echo")))
    assert "has changed during a rollout" in report["error"]


def test_steps_are_tested_one_by_one_and_their_mean_is_the_reward(tmp_path):
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\nmin_reward = 0.5\n[[steps]]\nname = "three"\n'
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two", "three")}
    test = 'cat amount.txt > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    amounts = {"steps__one__workdir__amount.txt": "1", "steps__two__workdir__amount.txt": "0.25"}
    report = asyncio.run(run_verifier(write(tmp_path / "task", toml=toml, test=test, **steps, **amounts), tmp_path))
    assert list(report["steps"]) == ["one", "two"], "the third does not start, since the second has too low a reward"
    assert report["rewards"] == {"reward": 0.625}


def test_files_of_a_later_step_do_not_follow_links_of_the_agent(tmp_path):
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    files = {"steps__two__workdir__sub__a.txt": "new", "steps__two__workdir__b.txt": "new"}
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two")}
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.txt").write_text("old")

    def add_links(workspace):
        if not (workspace / "sub").exists():
            (workspace / "sub").symlink_to(outside)
            (workspace / "b.txt").symlink_to(outside / "b.txt")

    report = asyncio.run(run_verifier(write(tmp_path / "task", toml=toml, **files, **steps), tmp_path, add_links))
    assert report["rewards"] == {"reward": 1.0}
    assert [file.name for file in outside.iterdir()] == ["b.txt"]
    assert (outside / "b.txt").read_text() == "old"
    assert (tmp_path / "workspace/sub/a.txt").read_text() == (tmp_path / "workspace/b.txt").read_text() == "new"


def test_only_what_can_be_tested_is_judged():
    verifier = VerifierJudgerConfig()
    routed = ComposedJudgerConfig(routes={"a": verifier, "*": {"type": "length"}})
    untested = task_at("x", tested=False)
    assert verifier.task_problem(task_at("x")) == ""
    for config in (verifier, ComposedJudgerConfig(parts=(verifier,)), RankingJudgerConfig(of=verifier)):
        assert config.required_evidence() == {"verifier"}
        assert config.task_problem(untested) == "its directory has no tests/test.sh"
    assert routed.required_evidence() == {"verifier"}
    assert routed.task_problem(untested) == ""


@NEEDS_BWRAP
def test_in_a_sandbox_tests_use_harbors_paths(tmp_path):
    from loopwright.execution.sandbox.bubblewrap import Bubblewrap

    test = 'pwd; ls /tests; [ -z "$(ls -A ' + str(tmp_path) + ' 2>/dev/null)" ] && echo 1 > /logs/verifier/reward.txt'
    toml = '[environment]\nworkdir = "/somewhere/else"\n'
    report = asyncio.run(run_verifier(write(tmp_path / "task", toml=toml, test=test), tmp_path, sandbox=Bubblewrap()))
    assert report["output"].split() == ["/somewhere/else", "test.sh"]
    assert report["rewards"] == {"reward": 1.0}


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ("[agent]\ntimeout_sec = 1\n", "not finished within 1 s (agent.timeout_sec)"),
        (
            "[agent]\ntimeout_sec = 60\n",
            "not finished within 3 s (deadline_s less verify_s)",
        ),
    ],
)
def test_a_timeout_names_its_limit(tmp_path, toml, reason):
    async def main():
        command = program(tmp_path, "chat(); time.sleep(1000)")
        async with open_setup(tmp_path, command=command, run_tests=True, deadline_s=4.0, verify_s=1.0) as setup:
            return await setup.roll(task_at(write(tmp_path / "task", toml=toml)))

    episode = asyncio.run(asyncio.wait_for(main(), 60))
    assert (episode.reason, episode.fault) == (f"{reason}; the agent was still working", Fault.POLICY)
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}
