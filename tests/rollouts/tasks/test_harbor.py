"""Harbor task directories: what is read, what is refused, and how a workspace starts."""

import json
import os
import tarfile
from pathlib import PurePosixPath

import pytest

from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.tasks.files import JsonlTasks
from loopwright.rollouts.tasks.harbor import cache as harbor_cache
from loopwright.rollouts.tasks.harbor.dockerfile import read_layout
from loopwright.rollouts.tasks.harbor.source import HarborTasks, TaskLocator, scan
from loopwright.rollouts.tasks.harbor.task import HarborTask, directory_digest
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.rollouts.tasks.sources import TasksError, shared_tasks
from tests.rollouts.harbor import task_at, write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def unchanged_files(monkeypatch):
    """Files look unchanged for a while; the file system's clock cannot be set."""
    monkeypatch.setattr(harbor_cache, "_SETTLE_NS", -(10**12))


def test_two_files_are_a_task(tmp_path):
    task = HarborTask.read(write(tmp_path / "t", toml="", instruction="  Do it.\n", test=None))
    (step,) = task.steps
    assert (step.instruction, step.agent_timeout_s, step.verifier_timeout_s) == ("Do it.", None, 600.0)
    assert not task.has_tests


def test_limits_variables_and_paths(tmp_path):
    toml = """
    [agent]
    timeout_sec = 5
    [verifier]
    timeout_sec = 7.5
    env = { A = "1" }
    [environment]
    workdir = "/srv"
    env = { B = "2" }
    docker_image = "python:3.12-slim"
    something_new = ["that we do not know"]
    """
    task = HarborTask.read(write(tmp_path / "t", toml=toml))
    (step,) = task.steps
    assert (step.agent_timeout_s, step.verifier_timeout_s, step.verifier_env) == (5.0, 7.5, {"A": "1"})
    assert (task.workdir, task.env, task.has_tests) == ("/srv", {"B": "2"}, True)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[agent\n", "task.toml: "),
        ('[agent]\ntimeout_sec = "long"', "task.toml: agent.timeout_sec: "),
        ("[verifier]\ntimeout_sec = -1", "task.toml: verifier.timeout_sec: "),
        ("[verifier]\ntimeout_sec = nan", "task.toml: verifier.timeout_sec: "),
        ("[verifier.env]\nA = 1", "task.toml: verifier.env.A: "),
        ('[environment]\nworkdir = "relative"', "task.toml: environment.workdir: "),
        ('[environment]\nos = "windows"', "task.toml: environment.os: 'windows' is not supported"),
        ('[verifier]\nenvironment_mode = "separate"', "only supported by Harbor itself"),
        ('[[steps]]\nname = "../up"', "task.toml: steps[0].name: "),
        (
            '[[steps]]\nname = "set up"',
            "set up/workdir/setup.sh: setup scripts of steps are only supported by Harbor itself",
        ),
        ('[[steps]]\nname = "one"', "one/instruction.md cannot be read"),
    ],
)
def test_problems_name_file_and_key(tmp_path, toml, says):
    with pytest.raises(TasksError) as caught:
        HarborTask.read(write(tmp_path / "t", toml=toml, **{"steps__set up__workdir__setup.sh": ""}))
    assert says in str(caught.value)


def test_an_empty_instruction_is_refused(tmp_path):
    with pytest.raises(TasksError, match=r"instruction\.md is empty"):
        HarborTask.read(write(tmp_path / "t", instruction=" \n"))


@pytest.mark.parametrize("name", ["task.toml", "tests/test.sh", "environment/deep/data", "solution/solve.sh"])
def test_the_hash_covers_every_file(tmp_path, name):
    files = {"environment__deep__data": "a", "solution__solve.sh": "b"}
    first, second = write(tmp_path / "a", **files), write(tmp_path / "b", **files)
    assert directory_digest(first) == directory_digest(second)
    (second / name).write_text((second / name).read_text() + "\n")
    assert directory_digest(first) != directory_digest(second)
    (first / "tests/test.sh").chmod(0o755)
    executable = directory_digest(first)
    (first / "tests/test.sh").chmod(0o644)
    assert directory_digest(first) != executable


def test_tasks_are_found_at_any_depth_and_each_bad_one_is_reported(tmp_path):
    write(tmp_path / "set/easy/a")
    write(tmp_path / "set/b")
    write(tmp_path / "set/hard/deep/bad", toml="[agent\n")
    (tmp_path / "set/notes").mkdir()
    entries = list(scan(tmp_path / "set"))
    assert [(each.id, each.task is not None) for each in entries] == [
        ("b", True),
        ("easy/a", True),
        ("hard/deep/bad", False),
    ]
    (reason,) = HarborTasks(path="set").unusable(tmp_path).values()
    assert "hard/deep/bad/task.toml" in reason
    (problem,) = HarborTasks(path="set/hard").problems(tmp_path)
    assert "hard/deep/bad/task.toml" in problem.message
    (only,) = scan(tmp_path / "set/b")
    assert only.id == "b"


@pytest.mark.parametrize(("path", "says"), [("nowhere", "does not exist"), (".", "contains no task")])
def test_a_directory_without_tasks_is_a_problem(tmp_path, path, says):
    (problem,) = HarborTasks(path=path).problems(tmp_path)
    assert says in problem.message


@pytest.mark.usefixtures("unchanged_files")
def test_the_dataset_is_cached_until_a_file_changes(tmp_path):
    write(tmp_path / "set/a")
    source = HarborTasks(path="set")
    fresh = source.load(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarborTasks, "_scan", lambda *_: pytest.fail("it was read again"))
        cached = source.load(tmp_path)
    assert cached == fresh
    mixes = [TaskMix({"set": tasks}, {"set": 1.0}, seed=0) for tasks in (fresh, cached)]
    assert mixes[0].fingerprint() == mixes[1].fingerprint(), "a run can be resumed from the cache"
    before = (tmp_path / "set/a/tests/test.sh").stat()
    (tmp_path / "set/a/tests/test.sh").write_text("X" * before.st_size)
    os.utime(tmp_path / "set/a/tests/test.sh", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.load(tmp_path)[0].extra["task_hash"] != fresh[0].extra["task_hash"]


@pytest.mark.usefixtures("unchanged_files")
def test_a_damaged_cache_is_rebuilt(tmp_path):
    write(tmp_path / "set/a")
    source = HarborTasks(path="set")
    fresh = source.load(tmp_path)
    (file,) = harbor_cache.directory().iterdir()
    file.write_bytes(b"no Parquet")
    assert source.load(tmp_path) == fresh


def test_just_written_files_are_read_again(tmp_path):
    write(tmp_path / "set/a")
    HarborTasks(path="set").load(tmp_path)
    assert not harbor_cache.directory().exists()


# -- the workspace -------------------------------------------------------------------------------------------------


ANY_MACHINE = "[metadata]\nneeds_image = false\n"


def laid_out(tmp_path, dockerfile=None, toml=ANY_MACHINE, **files):
    more = {} if dockerfile is None else {"environment__Dockerfile": dockerfile}
    layout = read_layout(HarborTask.read(write(tmp_path / "t", toml=toml, **files, **more)))
    layout.copy_into(tmp_path / "workspace")
    paths = (tmp_path / "workspace").rglob("*")
    return layout, sorted(str(p.relative_to(tmp_path / "workspace")) for p in paths if p.is_file())


def test_files_beside_a_prebuilt_image_go_into_the_working_directory(tmp_path):
    layout, files = laid_out(tmp_path, **{"environment__a.txt": "a", "environment__sub__b.txt": "b"})
    assert (layout.workdir, files) == ("/app", ["a.txt", "sub/b.txt"])


def test_copy_instructions_are_applied_without_docker(tmp_path):
    dockerfile = """
    # A comment
    ARG PYTHON=3.12 FOLDER=srv
    FROM python:${PYTHON}-slim
    ARG FOLDER
    ARG TARGET=inner
    ENV A=1 B="two words"
    ENV C three words
    ENV D=$A-${B} E='$A' F=\\$A G="${NONE:-none}" PATH="/srv/bin:$PATH" A=2
    WORKDIR /$FOLDER
    COPY files/ ./
    COPY --chown=me one.txt two.txt more/
    COPY ["one.txt", "renamed.txt"]
    WORKDIR inner
    COPY *.txt \\
        /srv/$TARGET/
    WORKDIR /srv
    CMD ["bash"]
    """
    names = ("files__f.txt", "files__deep__g.txt", "one.txt", "two.txt")
    layout, files = laid_out(tmp_path, dockerfile, **{f"environment__{name}": name for name in names})
    assert layout.workdir == "/srv"
    assert layout.env == {
        **dict.fromkeys("EF", "$A"),
        **dict(zip("ABCDG", ("2", "two words", "three words", "1-two words", "none"), strict=True)),
        "PATH": f"/srv/bin:{os.environ['PATH']}",
    }
    assert files == [
        *("deep/g.txt", "f.txt", "inner/one.txt", "inner/two.txt", "more/one.txt", "more/two.txt", "renamed.txt"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("RUN apt-get install -y gcc", "line 2: RUN needs Docker"),
        ("COPY --from=build /x /app/x", "line 2: copying anything but files beside"),
        ("COPY missing.txt .", "line 2: 'missing.txt' does not exist"),
        ("COPY ../task.toml .", "line 2: '../task.toml' does not exist"),
        ("COPY a.txt /etc/a.txt", "line 2: /etc/a.txt is outside the working directory"),
        ("USER me", "line 2: USER needs Docker"),
        ("ENV", "line 2: 'ENV' cannot be read"),
        ("COPY", "line 2: 'COPY' cannot be read"),
        ('COPY ["a", ', "line 2: 'COPY"),
        ('ENV A="b', "line 2: 'ENV"),
        ("ENV A=$NOWHERE", "line 2: the value of '$NOWHERE' needs Docker"),
        ("ARG B\nENV A=${B}", "line 3: the value of '${B}' needs Docker"),
        ("ENV A=${A:+b}", "line 2: the value of 'A=${A:+b}' needs Docker"),
        ("WORKDIR /$HOME", "line 2: the value of '$HOME' needs Docker"),
        ("COPY $NAME.txt .", "line 2: the value of '$NAME' needs Docker"),
        ('COPY ["$NAME.txt", "."]', "line 2: the value of '$NAME' needs Docker"),
        ("ADD a.tar.gz .", "line 2: ADD unpacks 'a.tar.gz'"),
        ("ADD packed .", "line 2: ADD unpacks 'packed'"),
        ("COPY a.txt .\nFROM y", "line 3: a Dockerfile with several stages"),
    ],
)
def test_instructions_that_need_docker_are_named_with_their_line(tmp_path, line, says):
    files = {"environment__a.txt": "a", "environment__a.tar.gz": "a"}
    with tarfile.open(write(tmp_path / "t", **files) / "environment/packed", "w:gz") as packed:
        packed.add(tmp_path / "t/environment/a.txt", "a.txt")
    with pytest.raises(TasksError) as caught:
        laid_out(tmp_path, f"FROM debian\n{line}\nWORKDIR /app\n", **files)
    assert says in str(caught.value)


def test_the_task_sets_its_working_directory(tmp_path):
    toml = f'{ANY_MACHINE}[environment]\nworkdir = "/here"\n'
    layout, _ = laid_out(
        tmp_path, "FROM debian\nWORKDIR /there\nCOPY a.txt /here/sub/\n", toml, **{"environment__a.txt": "a"}
    )
    assert (layout.workdir, layout.copies[0][1]) == ("/here", PurePosixPath("sub/a.txt"))


# -- where a task's directory is ----------------------------------------------------------------------------------


def test_an_instance_id_cannot_leave_its_root(tmp_path):
    task = task_at("", instance_id="../elsewhere")
    with pytest.raises(TasksError, match="would leave the directory"):
        TaskLocator(tmp_path, root="tasks").find(task)


def test_a_missing_task_names_the_searched_paths(tmp_path):
    with pytest.raises(TasksError, match=r"no task\.toml in .*/gone or .*/tasks/x"):
        TaskLocator(tmp_path, root="tasks").find(task_at("gone", instance_id="x"))


# -- at load time --------------------------------------------------------------------------------------------------


def rollout(**parts):
    return RolloutConfig.model_validate(
        {"tasks": {"type": "harbor", "path": "set"}, "judger": {"type": "verifier"}, **parts}
    )


def test_a_loop_that_cannot_run_tests_is_refused(tmp_path):
    write(tmp_path / "set/a")
    (problem,) = rollout(loop={"type": "single_turn"}).problems(tmp_path)
    assert "verifier, which loop type 'single_turn' does not record" in problem.message


def test_tasks_without_tests_are_refused(tmp_path):
    write(tmp_path / "set/a")
    remote = {"type": "remote", "command": ["true"]}
    assert rollout(loop=remote).problems(tmp_path) == []
    write(tmp_path / "set/b", test=None)
    (problem,) = rollout(loop=remote).problems(tmp_path)
    assert "task b cannot be judged: its directory has no tests/test.sh" in problem.message


def test_held_out_tasks_without_tests_are_refused(tmp_path):
    write(tmp_path / "set/a")
    write(tmp_path / "held/b", test=None)
    remote, held_out = {"type": "remote", "command": ["true"]}, EvalConfig(tasks=(HarborTasks(path="held"),))
    (problem,) = rollout(loop=remote).problems(tmp_path, held_out)
    assert "task b cannot be judged: its directory has no tests/test.sh" in problem.message


def test_a_held_out_task_among_the_training_tasks_is_refused(tmp_path):
    write(tmp_path / "set/train/a", instruction="Do a.")
    write(tmp_path / "set/eval/b", instruction="Do b.")
    every, held_out = [HarborTasks(path="set")], [HarborTasks(path="set/eval")]
    assert [task.id for task in shared_tasks(every, held_out, tmp_path)] == ["b"]
    assert shared_tasks([HarborTasks(path="set/train")], held_out, tmp_path) == []


def test_rows_that_differ_only_in_their_path_are_one_task(tmp_path):
    def rows(name, seed):
        row = {"prompt": "Solve the maze.", "extra_info": {"seed": seed, "index": len(name), "split": name}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        return [JsonlTasks(path=f"{name}.jsonl")]

    assert shared_tasks(rows("train", 1), rows("eval", 900), tmp_path) == []
    assert len(shared_tasks(rows("train", 1), rows("eval", 1), tmp_path)) == 1


def test_rows_of_other_sources_can_be_tested_too(tmp_path):
    path = write(tmp_path / "a")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Do it.", "instance_id": "a", "local_task_path": "a"}\n')
    config = rollout(tasks={"type": "jsonl", "path": "tasks.jsonl"}, loop={"type": "remote", "command": ["true"]})
    assert config.problems(tmp_path) == []
    (task,) = config.tasks[0].load(tmp_path)
    assert TaskLocator(tmp_path).read(task).path == path


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('"instance_id": "a"', "nor `task_root` or `task_template` leads to its tests"),
        ('"local_task_path": "gone"', "no task.toml in"),
        ('"local_task_path": "bare"', "has no tests/test.sh"),
        ('"local_task_path": "a", "task_hash": "0"', "has changed since its tasks were loaded"),
    ],
)
def test_rows_without_tests_are_refused_at_load_time(tmp_path, row, says):
    write(tmp_path / "a")
    write(tmp_path / "bare", test=None)
    (tmp_path / "tasks.jsonl").write_text(f'{{"prompt": "Do it.", {row}}}\n')
    config = rollout(tasks={"type": "jsonl", "path": "tasks.jsonl"}, loop={"type": "remote", "command": ["true"]})
    (problem,) = config.problems(tmp_path)
    assert says in problem.message
