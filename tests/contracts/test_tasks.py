"""Contracts of tasks: A02."""

import pyarrow.parquet
import pytest

import loopwright
from loopwright.core.outcome import Fault, Outcome
from loopwright.rollouts.tasks.files import ParquetTasks
from loopwright.rollouts.tasks.harbor import cache as harbor_cache
from loopwright.rollouts.tasks.harbor.source import HarborTasks, TaskLocator
from loopwright.rollouts.tasks.sources import TasksError
from tests.rollouts.harbor import task_at, write

VERL = {"data_source", "prompt", "ability", "reward_model", "extra_info"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(harbor_cache, "_SETTLE_NS", -(10**12))


def test_a02_two_files_suffice_and_others_are_used(tmp_path):
    write(tmp_path / "tasks/bare", toml="", instruction="Just this.", test=None)
    write(tmp_path / "tasks/whole", **{"environment__a.txt": "a", "solution__solve.sh": "echo"})
    bare, whole = HarborTasks(path="tasks").load(tmp_path)
    assert bare.messages == ({"role": "user", "content": "Just this."},)
    assert (bare.extra["tested"], whole.extra["tested"]) == (False, True)
    assert whole.extra["difficulty"] == "easy"


def test_a02_rows_have_their_path_and_the_columns_that_verl_reads(tmp_path):
    path = write(tmp_path / "tasks/deep/one")
    (row,) = HarborTasks(path="tasks").rows(tmp_path)
    assert (row["instance_id"], row["local_task_path"]) == ("deep/one", str(path))
    assert set(row) >= VERL
    assert row["prompt"] == [{"role": "user", "content": "Do it."}]
    assert set(row["reward_model"]) == {"style", "ground_truth"}
    assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (0, "train")


def test_a02_the_dataset_is_cached_as_parquet_and_a_changed_task_is_read_again(tmp_path):
    path = write(tmp_path / "tasks/one")
    source = HarborTasks(path="tasks")
    rows = list(source.rows(tmp_path))
    (file,) = harbor_cache.directory().glob("*.parquet")
    (cached,) = pyarrow.parquet.read_table(file).to_pylist()
    nothing = {"needs_docker": None, "problem": None}
    assert [cached] == [{**rows[0], **nothing}]
    assert rows == list(source.rows(tmp_path))
    (path / "instruction.md").write_text("Do something else.")
    (changed,) = source.rows(tmp_path)
    assert changed["prompt"][0]["content"] == "Do something else."
    assert changed["task_hash"] != rows[0]["task_hash"]
    write(tmp_path / "tasks/two")
    assert [row["instance_id"] for row in source.rows(tmp_path)] == ["one", "two"]


def test_a02_train_and_validation_directories(tmp_path):
    for split in ("train", "eval"):
        write(tmp_path / split / "one")
    splits = [HarborTasks(path=path).load(tmp_path)[0].extra["extra_info"]["split"] for path in ("train", "eval")]
    assert splits == ["train", "validation"]
    assert HarborTasks(path="eval", split="mine").load(tmp_path)[0].extra["extra_info"]["split"] == "mine"


def test_a02_a_path_resolves_explicit_then_root_and_id_then_template(tmp_path):
    explicit, rooted, shaped = (write(tmp_path / name / "x") for name in ("explicit", "root", "by/template"))
    template = TaskLocator(tmp_path, root="root", template="by/template/{instance_id}")
    assert template.find(task_at("explicit/x", instance_id="x")) == explicit
    assert template.find(task_at("", instance_id="x")) == rooted
    assert template.find(task_at("gone", instance_id="x")) == rooted, "a dataset of another machine"
    assert TaskLocator(tmp_path, template="by/template/{instance_id}").find(task_at("", instance_id="x")) == shaped
    assert template.find(task_at("")) is None
    with pytest.raises(TasksError, match=" or "):
        template.find(task_at("gone", instance_id="y"))


def test_a02_a_scanned_dataset_is_a_source_like_any_other(tmp_path):
    from typer.testing import CliRunner

    from loopwright.cli import app

    write(tmp_path / "mine/one")
    done = CliRunner().invoke(app, ["tasks", "scan", str(tmp_path / "mine"), "-o", str(tmp_path / "tasks.parquet")])
    assert done.exit_code == 0, done.output
    (task,) = ParquetTasks(path="tasks.parquet").load(tmp_path)
    assert task.messages == HarborTasks(path="mine").load(tmp_path)[0].messages
    assert TaskLocator(tmp_path / "elsewhere").read(task).path == tmp_path / "mine/one"


SCENARIO = """
name = "study"
[[run]]
name = "first"
agent = { type = "collect", trials = 4, group_size = 1, seed = 1 }
engine = { type = "scripted" }
[run.rollout]
tasks = { type = "harbor", path = "tasks" }
loop = { type = "remote", command = ["bash", "-c", "ls -A > seen.txt; touch done"], deadline_s = 60 }
judger = { type = "verifier" }
"""


def test_a02_a_run_over_task_directories_is_judged_by_their_tests(tmp_path):
    """The reward of the tests; if they are broken, no reward and the judge's fault, never zero."""
    reward = '> "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    only = '[ "$(cat seen.txt)" = "$(printf "a.txt\\nseen.txt")" ]'
    write(tmp_path / "tasks/good", test=f"[ -e done ] && {only} && echo 1 {reward}", **{"environment__a.txt": "a"})
    write(tmp_path / "tasks/nan", test=f"echo nan {reward}")
    write(tmp_path / "tasks/crash", test="exit 7")
    write(tmp_path / "tasks/zero", test=f"echo 0 {reward}")
    (tmp_path / "study.toml").write_text(SCENARIO)
    assert loopwright.dispatch(loopwright.load(tmp_path / "study.toml"), tmp_path / "out") == 0
    with loopwright.Ledger.read(tmp_path / "out/first/ledger.db") as ledger:
        results = {t.action["task"]: (t.outcome, t.fault, t.reward and t.reward.value) for t in ledger.trials()}
    assert results == {
        "good": (Outcome.OK, None, 1.0),
        "zero": (Outcome.OK, None, 0.0),
        "nan": (Outcome.JUDGE_FAILED, Fault.JUDGE, None),
        "crash": (Outcome.JUDGE_FAILED, Fault.JUDGE, None),
    }
