"""The verifier: what a task's tests say, and that broken tests say nothing."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault
from loopwright.core.reward import Reward
from loopwright.execution.sandbox import sandbox_of
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.judgers.composed import ComposedJudgerConfig
from loopwright.rollouts.judgers.facts import VerifierJudger, VerifierJudgerConfig
from loopwright.rollouts.judgers.ranking import RankingJudgerConfig
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.verify import prepare
from loopwright.rollouts.tasks.base import TasksError
from loopwright.rollouts.tasks.harbor.reward import NoVerdict, rewards_in
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import TaskChanged, digest_of, resolved
from loopwright.testing.executors import alive
from tests.rollouts.harbor import PASS, task_at, verified, write
from tests.rollouts.remote.agents import program, staged

NEEDS_BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
REWARD = 'cat > "$LOOPWRIGHT_VERIFIER_DIR/reward.json" <<< '


def judged(said, **settings):
    config = VerifierJudgerConfig(**settings)
    payload = Payload.of(Episode(task_at("x"), evidence={"verifier": said} if said else {}), ("evidence",))
    return asyncio.run(VerifierJudger(config, None).judge(payload))


def story(tmp_path, test, **files):
    return asyncio.run(verified(write(tmp_path / "task", test=test, **files), tmp_path))


def test_reward_txt_is_one_number(tmp_path):
    said = story(tmp_path, 'echo checking; echo 0.25 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"')
    assert (said["rewards"], said["exit_code"], said["output"]) == ({"reward": 0.25}, 0, "checking")
    assert said["seconds"] >= 0
    assert judged(said) == Reward(0.25, {"reward": 0.25})


def test_reward_json_is_named_numbers_and_comes_first(tmp_path):
    said = story(
        tmp_path, f"""{REWARD} '{{"style": 0.5, "tests": 2}}'; echo 7 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" """
    )
    assert said["rewards"] == {"style": 0.5, "tests": 2.0}
    assert judged(said) == Reward(2.5, {"style": 0.5, "tests": 2.0})
    assert judged(said, reward="tests").value == 2.0
    with pytest.raises(JudgeFailed, match="no reward 'speed', only style, tests"):
        judged(said, reward="speed")


@pytest.mark.parametrize(
    ("named", "number", "rewards"),
    [
        ('{"reward": 1}', "0", {"reward": 0.0}),
        ('{"reward": 0}', "1", {"reward": 0.0}),
        ('{"a": 1, "b": 1}', "0.5", {"a": 1.0, "b": 1.0, "reward": 0.5}),
        ('{"reward": 1', "0", {"reward": 0.0}),
        ('{"reward": 0}', "one", {"reward": 0.0}),
    ],
)
def test_of_two_rewards_the_lower_counts_and_a_broken_one_does_not(tmp_path, named, number, rewards):
    """One of them may be the agent's, which is neither to raise its reward nor to make it go away."""
    said = story(tmp_path, f"""{REWARD} '{named}'; echo {number} > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" """)
    assert said["rewards"] == rewards


def test_a_reward_that_is_a_directory_leaves_no_file_open(tmp_path):
    (tmp_path / "reward.json").mkdir()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(NoVerdict, match="no file"):
            rewards_in(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_part_called_reward_is_the_reward(tmp_path):
    assert judged(story(tmp_path, f"""{REWARD} '{{"reward": 1, "lines": 40}}'""")).value == 1.0


@pytest.mark.parametrize(
    ("test", "says"),
    [
        (f"{REWARD} '{{\"reward\": NaN}}'", "no JSON"),
        (f"{REWARD} '{{\"reward\": 1e999}}'", "no JSON|no finite number"),
        (f"{REWARD} '{{\"reward\": true}}'", "no finite number"),
        (f'{REWARD} \'{{"reward": "1"}}\'', "no finite number"),
        (f'{REWARD} \'{{"reward": {{"a": 1}}}}\'', "no finite number"),
        (f"{REWARD} '{{}}'", "without named numbers"),
        (f"{REWARD} '1'", "without named numbers"),
        (f"{REWARD} '{{\"reward\": 1'", "no JSON"),
        ('echo nan > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "no finite number"),
        ('echo inf > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "no finite number"),
        ('echo good > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "no number"),
        ('touch "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "no number"),
        ('yes | head -c 100000 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"', "too large"),
        ('mkfifo "$LOOPWRIGHT_VERIFIER_DIR/reward.json"', "no file"),
        ('ln -s /etc/hostname "$LOOPWRIGHT_VERIFIER_DIR/reward.json"', "cannot be read"),
        ("echo oops >&2; exit 3", "neither reward.json nor reward.txt"),
        ("kill -SEGV $$", "SIGSEGV"),
    ],
)
def test_broken_tests_are_no_verdict_and_never_a_zero(tmp_path, test, says):
    said = story(tmp_path, test)
    assert "rewards" not in said
    with pytest.raises(JudgeFailed, match=says):
        judged(said)


def test_a_reward_counts_whatever_the_exit_code(tmp_path):
    said = story(tmp_path, 'echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; exit 1')
    assert (said["rewards"], said["exit_code"]) == ({"reward": 0.0}, 1)


def test_tests_that_never_end_are_ended_with_all_that_they_started(tmp_path):
    toml = "[verifier]\ntimeout_sec = 0.5\n"
    test = 'echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; setsid sleep 1000 & echo $! > ../pid; sleep 1000'
    said = asyncio.run(verified(write(tmp_path / "task", toml=toml, test=test), tmp_path))
    assert said["error"] == "test.sh was ended after 0.5 s"
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(JudgeFailed, match=r"ended after 0\.5 s"):
        judged(said)
    assert judged(said, broken=0.0) == Reward(0.0, {"verifier": 0.0})


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bwrap", marks=NEEDS_BWRAP)])
@pytest.mark.parametrize("crash", ["exit 139", "bash -c 'kill -SEGV $$'", "kill -KILL $$"])
def test_a_crash_loses_no_reward(tmp_path, sandbox, crash):
    """Most tests end on the agent's own program; it must not escape a zero by crashing."""
    test = f'echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"; {crash}'
    said = asyncio.run(verified(write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of(sandbox)))
    assert judged(said) == Reward(0.0, {"reward": 0.0})


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bwrap", marks=NEEDS_BWRAP)])
def test_a_crash_without_a_reward_is_an_end_by_signal(tmp_path, sandbox):
    said = asyncio.run(verified(write(tmp_path / "task", test="exit 139"), tmp_path, sandbox=sandbox_of(sandbox)))
    with pytest.raises(JudgeFailed, match=r"SIGSEGV.* left neither"):
        judged(said)
    assert judged(said, broken=0.0).value == 0.0


def test_broken_is_for_steps_too(tmp_path):
    toml = '[verifier]\ntimeout_sec = 0.5\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two")}
    files = {**steps, "steps__two__workdir__late": ""}
    path = write(tmp_path / "task", toml=toml, test=f"[ ! -e late ] || sleep 1000\n{PASS}", **files)
    said = asyncio.run(verified(path, tmp_path))
    assert said["error"].startswith("step two: test.sh was ended after")
    assert judged(said, broken=0.0).value == 0.0


def test_broken_is_for_tests_that_were_stopped_alone(tmp_path):
    with pytest.raises(JudgeFailed, match="neither"):
        judged(story(tmp_path, "exit 1"), broken=0.0)


def test_no_tests_at_all_are_no_verdict():
    with pytest.raises(JudgeFailed, match="no tests were run"):
        judged(None)


def test_the_workspace_begins_with_the_files_of_the_environment(tmp_path):
    test = '[ "$(cat sub/data.txt)" = hello ] && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    assert story(tmp_path, test, environment__sub__data=".", **{"environment__sub__data.txt": "hello\n"})["rewards"]


def test_tests_see_copies_of_themselves_and_none_is_left(tmp_path):
    test = 'echo spoiled > "$LOOPWRIGHT_TESTS_DIR/helper.txt"; cat "$LOOPWRIGHT_TESTS_DIR/helper.txt"; exit 1'
    said = story(tmp_path, test, **{"tests__helper.txt": "as it was"})
    assert said["output"] == "spoiled"
    assert (tmp_path / "task/tests/helper.txt").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task", "workspace"]


def test_nothing_of_the_tests_is_in_the_workspace_while_the_agent_works(tmp_path):
    seen = []
    path = write(tmp_path / "task", **{"environment__a.txt": "a", "solution__solve.sh": "echo"})
    asyncio.run(verified(path, tmp_path, lambda workspace: seen.extend(workspace.rglob("*"))))
    assert [file.name for file in seen] == ["a.txt"]


def test_variables_of_the_environment_and_of_the_verifier(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN", "ours")
    monkeypatch.setenv("SECRET", "hidden")
    toml = '[environment.env]\nA = "1"\nB = "${OWN}"\n[verifier.env]\nC = "${NONE:-c}"\n'
    said = asyncio.run(verified(write(tmp_path / "task", toml=toml, test='echo "$A $B $C [$SECRET]"'), tmp_path))
    assert said["output"] == "1 ours c []"


def test_a_variable_that_is_not_set_is_named(tmp_path):
    path = write(tmp_path / "task", toml='[environment.env]\nA = "${NOWHERE}"\n')
    with pytest.raises(TasksError, match=r"task\.toml, environment\.env needs the environment variable NOWHERE"):
        prepare(task_at(path), tmp_path, TaskLocator(tmp_path))


def test_a_variable_that_only_tests_need_is_missed_before_the_agent_begins(tmp_path):
    path = write(tmp_path / "task", toml='[verifier.env]\nA = "${NOWHERE}"\n')
    says = r"task\.toml, verifier\.env needs the environment variable NOWHERE, which is not set"
    with pytest.raises(TasksError, match=says):
        prepare(task_at(path), tmp_path, TaskLocator(tmp_path))
    assert prepare(task_at(path), tmp_path, TaskLocator(tmp_path), verifies=False).tests_env == {}
    assert re.search(says, RemoteConfig(command=("agent",)).task_problem(task_at(path), tmp_path))


def test_a_variable_is_a_template_as_a_whole_or_not_at_all(monkeypatch):
    """As with Harbor."""
    monkeypatch.setenv("OWN", "ours")
    given = {"A": "${OWN}", "B": "${OWN}/bin", "C": "${NONE:-a}b}", "D": "$OWN"}
    assert resolved(given, "here") == {"A": "ours", "B": "${OWN}/bin", "C": "a}b", "D": "$OWN"}


def test_what_python_leaves_in_a_task_is_no_part_of_it_and_a_repository_is(tmp_path):
    path = write(tmp_path / "task", test=f'find . "$LOOPWRIGHT_TESTS_DIR" -name "*.pyc" -o -name HEAD; {PASS}')
    for name in ("tests/sub/__pycache__/a.pyc", "environment/__pycache__/a.pyc", "environment/.git/HEAD"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("x")
    digest = digest_of(path)
    assert asyncio.run(verified(path, tmp_path))["output"] == "./.git/HEAD"
    next(path.rglob("*.pyc")).write_text("y")
    assert digest_of(path) == digest
    (path / "environment/.git/HEAD").write_text("y")
    assert digest_of(path) != digest


def test_a_task_that_changed_since_it_was_loaded_is_refused(tmp_path):
    path = write(tmp_path / "task")
    prepared = prepare(task_at(path), tmp_path, TaskLocator(tmp_path))
    known = task_at(path, task_hash=prepared.task.digest)
    assert prepare(known, tmp_path, TaskLocator(tmp_path)) == prepared
    (path / "tests/test.sh").write_text("exit 0")
    with pytest.raises(TaskChanged, match="has changed since its tasks were loaded"):
        prepare(known, tmp_path, TaskLocator(tmp_path))


def test_a_task_that_changes_while_the_agent_works_gives_no_verdict(tmp_path):
    path = write(tmp_path / "task")
    said = asyncio.run(verified(path, tmp_path, lambda _: (path / "tests/more.sh").write_text("echo")))
    assert "has changed during a rollout" in said["error"]


def test_steps_are_tested_one_by_one_and_their_mean_is_the_reward(tmp_path):
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\nmin_reward = 0.5\n[[steps]]\nname = "three"\n'
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two", "three")}
    test = 'cat amount.txt > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    amounts = {"steps__one__workdir__amount.txt": "1", "steps__two__workdir__amount.txt": "0.25"}
    said = asyncio.run(verified(write(tmp_path / "task", toml=toml, test=test, **steps, **amounts), tmp_path))
    assert list(said["steps"]) == ["one", "two"], "the third is not begun after a second that is not good enough"
    assert said["rewards"] == {"reward": 0.625}


def test_files_of_a_later_step_do_not_follow_links_of_the_agent(tmp_path):
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    files = {"steps__two__workdir__sub__a.txt": "new", "steps__two__workdir__b.txt": "new"}
    steps = {f"steps__{name}__instruction.md": f"Step {name}." for name in ("one", "two")}
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.txt").write_text("old")

    def lure(workspace):
        if not (workspace / "sub").exists():
            (workspace / "sub").symlink_to(outside)
            (workspace / "b.txt").symlink_to(outside / "b.txt")

    said = asyncio.run(verified(write(tmp_path / "task", toml=toml, **files, **steps), tmp_path, lure))
    assert said["rewards"] == {"reward": 1.0}
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
def test_in_a_room_with_walls_tests_find_harbors_own_paths(tmp_path):
    from loopwright.execution.sandbox.bubblewrap import Bubblewrap

    test = 'pwd; ls /tests; [ -z "$(ls -A ' + str(tmp_path) + ' 2>/dev/null)" ] && echo 1 > /logs/verifier/reward.txt'
    toml = '[environment]\nworkdir = "/somewhere/else"\n'
    said = asyncio.run(verified(write(tmp_path / "task", toml=toml, test=test), tmp_path, sandbox=Bubblewrap()))
    assert said["output"].split() == ["/somewhere/else", "test.sh"]
    assert said["rewards"] == {"reward": 1.0}


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agent]\ntimeout_sec = 1\n", "not done within 1 s (agent.timeout_sec); the agent was still at work"),
        ("[agent]\ntimeout_sec = 60\n", "not done within 3 s (deadline_s less verify_s); the agent was still at work"),
    ],
)
def test_an_agent_that_is_late_is_told_by_which_limit(tmp_path, toml, said):
    async def main():
        command = program(tmp_path, "chat(); time.sleep(1000)")
        async with staged(tmp_path, command=command, verifies=True, deadline_s=4.0, verify_s=1.0) as stage:
            return await stage.roll(task_at(write(tmp_path / "task", toml=toml)))

    episode = asyncio.run(asyncio.wait_for(main(), 60))
    assert (episode.reason, episode.fault) == (said, Fault.POLICY)
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}
