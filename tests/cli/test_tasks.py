"""`loopwright tasks scan`: the tasks, their problems, and the dataset."""

import json

from tests.rollouts.harbor import write

WANTED = (
    '[ -e done ] && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" || echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
)


def test_scan_prints_a_table_and_writes_a_dataset(loopwright, tmp_path):
    write(tmp_path / "eval/a")
    write(tmp_path / "eval/deep/b", test=None)
    done = loopwright("tasks", "scan", "eval", "-o", "data/tasks.jsonl")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["task", "difficulty", "steps", "tests", "solution"],
        ["a", "easy", "1", "yes", "no"],
        ["deep/b", "easy", "1", "no", "no"],
        ["2", "tasks"],
        ["wrote", "2", "tasks", "to", "data/tasks.jsonl"],
    ]
    rows = [json.loads(line) for line in (tmp_path / "data/tasks.jsonl").read_text().splitlines()]
    assert [(row["instance_id"], row["data_source"], row["extra_info"]["split"]) for row in rows] == [
        ("a", "eval", "validation"),
        ("deep/b", "eval", "validation"),
    ]


def test_every_problem_is_listed_and_the_good_ones_are_written(loopwright, tmp_path):
    write(tmp_path / "set/good")
    write(tmp_path / "set/bad", toml="[agent]\ntimeout_sec = 'x'")
    write(tmp_path / "set/worse", instruction="")
    done = loopwright("tasks", "scan", "set", "-o", "tasks.jsonl")
    assert done.returncode == 2
    assert "3 tasks, 2 of them unusable" in done.stdout
    assert "bad/task.toml: agent.timeout_sec: " in done.stderr
    assert "worse/instruction.md is empty" in done.stderr
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 1


def test_check_runs_the_tests_before_and_after_the_solution(loopwright, tmp_path):
    write(tmp_path / "set/good", test=WANTED, **{"solution__solve.sh": "touch done"})
    write(tmp_path / "set/free", **{"solution__solve.sh": "true"})
    write(tmp_path / "set/lazy", test=WANTED, **{"solution__solve.sh": "echo no idea; exit 3"})
    done = loopwright("tasks", "scan", "set", "--check", "-o", "tasks.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "free: the initial state scores 1, not 0",
        "lazy: its solution: solve.sh exited with 3: no idea",
    ]
    assert [json.loads(line)["id"] for line in (tmp_path / "tasks.jsonl").read_text().splitlines()] == ["good"]


def test_check_reports_the_tricks_that_a_task_falls_for(loopwright, tmp_path):
    """Given tests that any link, module or program satisfies, each of them is named, and the task is not written."""
    reward = '&& echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt" || echo 0 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    copy = {"environment__config__a": "a", "solution__solve.sh": "cp -r config backup"}
    write(tmp_path / "set/alias", test=f"diff -r config backup {reward}", **copy)
    careless = '[verifier.env]\nPYTHONSAFEPATH = ""'
    load = "python3 -c 'import json, sys; sys.exit(json.load(open(\"answer\")) != 42)'"
    write(tmp_path / "set/shadow", toml=careless, test=f"{load} {reward}", **{"solution__solve.sh": "echo 42 > answer"})
    write(tmp_path / "set/forge", test=f"python3 main.py {reward}", **{"solution__solve.sh": "touch main.py"})
    fine = f'[ "$(cat answer)" = 42 ] {reward}'
    write(tmp_path / "set/sound", test=fine, **{"solution__solve.sh": "echo 42 > answer"})
    done = loopwright("tasks", "scan", "set", "--check", "-o", "tasks.jsonl")
    assert done.returncode == 2
    rows = [line.split() for line in done.stdout.splitlines()[1:5]]
    assert [(row[0], row[-1]) for row in rows] == [
        *(("alias", "alias"), ("forge", "forge"), ("shadow", "shadow"), ("sound", "none"))
    ]
    assert done.stderr.splitlines() == [
        "alias: a link in the place of a copy scores 1, not 0",
        "forge: a program that writes the reward itself scores 1, not 0",
        "shadow: a json.py, or a program called diff, in the workspace scores 1, not 0",
    ]
    assert [json.loads(line)["id"] for line in (tmp_path / "tasks.jsonl").read_text().splitlines()] == ["sound"]


def test_an_empty_directory_is_an_error(loopwright, tmp_path):
    done = loopwright("tasks", "scan", ".")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no task found in ." in done.stderr
    assert loopwright("tasks", "scan", "nowhere").returncode == 1
    assert "ends in .parquet or .jsonl" in loopwright("tasks", "scan", ".", "-o", "x.csv").stderr
