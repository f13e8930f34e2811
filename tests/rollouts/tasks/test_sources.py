"""Task sources, and the order of tasks."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.task import Task
from loopwright.rollouts.tasks.files import JsonlTasks, ParquetTasks
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.rollouts.tasks.sources import PythonTasks, TasksConfig, TasksError


def tasks(count, name="t"):
    return [Task(f"{name}/{i}", ({"role": "user", "content": str(i)},), i) for i in range(count)]


class TestJsonl:
    def load(self, directory, text):
        (directory / "sums.jsonl").write_text(text)
        return JsonlTasks(path="sums.jsonl").load(directory)

    def test_each_line_is_a_task(self, tmp_path):
        first, second = self.load(tmp_path, '{"prompt": "1+1=", "label": "2"}\n\n{"prompt": "1+2=", "id": "b"}\n')
        assert (first.id, first.label, first.data_source) == ("sums/0", "2", "sums")
        assert (second.id, second.label) == ("b", None)

    @pytest.mark.parametrize(
        ("line", "words"),
        [("{", "line 4: "), ("3", "line 4 is int, not a table"), ("{}", "line 4: a task needs `prompt`")],
    )
    def test_a_bad_line_is_named_by_its_number(self, tmp_path, line, words):
        text = f'{{"prompt": "a"}}\n\n{{"prompt": "b"}}\n{line}\n'
        with pytest.raises(TasksError, match=rf"^sums\.jsonl, {words}"):
            self.load(tmp_path, text)
        (problem,) = JsonlTasks(path="sums.jsonl").problems(tmp_path)
        assert problem.key == "sums"
        assert "line 4" in problem.message

    def test_a_file_that_is_missing_or_empty(self, tmp_path):
        with pytest.raises(TasksError, match=r"nowhere\.jsonl"):
            JsonlTasks(path="nowhere.jsonl").load(tmp_path)
        with pytest.raises(TasksError, match="it has no tasks"):
            self.load(tmp_path, "\n")


class TestParquet:
    def write(self, directory, columns):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), directory / "sums.parquet")

    def test_a_task_per_row_and_nulls_are_ignored(self, tmp_path):
        chat = [[{"role": "user", "content": "hi"}], None]
        self.write(tmp_path, {"messages": chat, "prompt": [None, "b"], "label": [1, 2], "id": ["x", None]})
        first, second = ParquetTasks(path="sums.parquet", name="s").load(tmp_path)
        assert (first.id, first.messages) == ("x", ({"role": "user", "content": "hi"},))
        assert (second.id, second.messages) == ("s/1", ({"role": "user", "content": "b"},))

    def test_a_bad_row_is_named(self, tmp_path):
        self.write(tmp_path, {"prompt": ["a", None]})
        with pytest.raises(TasksError, match="row 1: a task needs"):
            ParquetTasks(path="sums.parquet").load(tmp_path)

    def test_a_file_of_another_format_is_refused(self, tmp_path):
        (tmp_path / "sums.parquet").write_text("no parquet")
        (problem,) = ParquetTasks(path="sums.parquet").problems(tmp_path)
        assert "Parquet" in problem.message

    def test_a_missing_package_names_the_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
        with pytest.raises(TasksError, match=r"pip install 'loopwright\[parquet\]'"):
            ParquetTasks(path="sums.parquet").load(tmp_path)


class TestPython:
    @pytest.fixture(autouse=True)
    def _module(self, tmp_path):
        (tmp_path / "task_factories.py").write_text(
            "import datetime\n"
            "def sums(count=2):\n    return ({'prompt': f'{n}+1=', 'label': (n, n + 1)} for n in range(count))\n"
            "def broken():\n    yield {'prompt': 'a'}\n    raise ValueError('no more')\n"
            "def odd():\n    return [{'prompt': 'a', 'label': object()}]\n"
            "def dated():\n    return [{'prompt': 'a', 'label': datetime.date(2026, 1, 2)}]\n"
            "def nothing():\n    return None\n"
        )
        yield
        sys.modules.pop("task_factories", None)

    def test_a_function_returns_the_rows(self, tmp_path):
        tasks = PythonTasks(function="task_factories:sums", args={"count": 3}).load(tmp_path)
        assert [(task.id, task.data_source) for task in tasks] == [(f"sums/{n}", "sums") for n in range(3)]

    def test_labels_are_as_the_ledger_returns_them(self, tmp_path):
        assert PythonTasks(function="task_factories:sums").load(tmp_path)[0].label == [0, 1]
        assert PythonTasks(function="task_factories:dated").load(tmp_path)[0].label == "2026-01-02"

    @pytest.mark.parametrize(
        ("function", "args", "words"),
        [
            ("task_factories:broken", {}, "task_factories:broken failed: ValueError: no more"),
            ("task_factories:nothing", {}, "task_factories:nothing failed: TypeError"),
            ("task_factories:sums", {"many": 1}, "failed: TypeError.*many"),
            ("task_factories:odd", {}, "row 0: .*not JSON serializable"),
            ("task_factories:missing", {}, "missing"),
            ("no_factories_here:f", {}, "no_factories_here"),
        ],
    )
    def test_problems_are_reported_at_load_time(self, tmp_path, function, args, words):
        with pytest.raises(TasksError, match=words):
            PythonTasks(function=function, args=args).load(tmp_path)
        assert len(PythonTasks(function=function, args=args).problems(tmp_path)) == 1


def test_any_error_of_a_third_party_source_is_reported(tmp_path):
    class Flaky(TasksConfig):
        type: Literal["flaky"] = "flaky"

        def label(self) -> str:
            return "flaky"

        def rows(self, directory: Any) -> Iterable[Mapping[str, Any]]:
            raise ZeroDivisionError("oh")

    with pytest.raises(TasksError, match="ZeroDivisionError: oh"):
        Flaky().load(tmp_path)


# -- the mix -----------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.0, 2.5, 7.0, 50.0]) | st.floats(0.01, 100), min_size=1, max_size=9)


def mix(weights, *, sizes=5, seed=0):
    names = [f"s{i}" for i in range(len(weights))]
    return TaskMix({name: tasks(sizes, name) for name in names}, dict(zip(names, weights, strict=True)), seed)


def draw(mix, count):
    return [mix.draw() for _ in range(count)]


@given(WEIGHTS, st.integers(1, 150))
def test_l09_each_source_has_its_share_to_within_one_at_any_moment(weights, count):
    counts, task_mix = Counter(), mix(weights)
    for after in range(1, count + 1):
        counts[task_mix.draw().source] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"s{i}"] - after * weight / sum(weights)) < 1 + 1e-9


def test_l09_small_sources_are_not_starved_by_many_of_them():
    weights = [50.0, *[1.0] * 11]
    counts = Counter(prompt.source for prompt in draw(mix(weights), 61))
    assert counts == {"s0": 50, **{f"s{i}": 1 for i in range(1, 12)}}


@given(st.integers(1, 8), st.integers(0, 3))
def test_each_epoch_is_a_new_permutation(size, seed):
    indices = [prompt.index for prompt in draw(mix([1.0], sizes=size, seed=seed), 4 * size)]
    epochs = [indices[start : start + size] for start in range(0, 4 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert indices == [prompt.index for prompt in draw(mix([1.0], sizes=size, seed=seed), 4 * size)]


def test_epochs_and_seeds_differ():
    first, second = (draw(mix([1.0], sizes=20, seed=seed), 40) for seed in (0, 1))
    assert first[:20] != first[20:]
    assert first[:20] != second[:20]


@given(WEIGHTS, st.integers(0, 40))
def test_l09_a_restored_mix_continues_exactly(weights, count):
    whole = draw(mix(weights), count + 20)
    again = mix(weights)
    again.restore(Counter(prompt.source for prompt in whole[:count]))
    assert draw(again, 20) == whole[count:]


def test_a_removed_source_is_dropped_and_a_new_one_catches_up():
    task_mix = mix([1.0, 1.0])
    task_mix.restore({"s0": 10, "gone": 5})
    assert [prompt.source for prompt in islice(draw(task_mix, 12), 10)] == ["s1"] * 10


def test_adding_a_source_does_not_change_the_order_of_another():
    alone = [prompt.index for prompt in draw(mix([1.0]), 10)]
    shared = [prompt.index for prompt in draw(mix([1.0, 3.0]), 40) if prompt.source == "s0"]
    assert shared == alone


def test_a_prompt_is_found_by_its_action():
    task_mix = mix([1.0, 2.0])
    for prompt in draw(task_mix, 9):
        assert task_mix.find(prompt.action) == prompt
    for action in ({"source": "s0", "index": -1}, {"source": "s0", "index": 5}, {"source": "x", "index": 0}):
        with pytest.raises(LookupError):
            task_mix.find(action)


def test_the_fingerprint_changes_with_any_task():
    def fingerprint(**sources):
        return TaskMix(sources, dict.fromkeys(sources, 1.0), 0).fingerprint()

    one = fingerprint(a=tasks(3), b=tasks(2))
    assert one == fingerprint(a=tasks(3), b=tasks(2))
    others = [
        fingerprint(a=tasks(3), c=tasks(2)),
        fingerprint(a=tasks(4), b=tasks(2)),
        fingerprint(a=tasks(3, "u"), b=tasks(2)),
        fingerprint(a=tasks(2), b=tasks(3)),
        fingerprint(a=list(reversed(tasks(3))), b=tasks(2)),
    ]
    assert len({one, *others}) == 6


def test_sources_are_mixed_by_their_names(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    configs = [JsonlTasks(path="a.jsonl", weight=3), JsonlTasks(path="a.jsonl", name="b")]
    counts = Counter(prompt.source for prompt in draw(TaskMix.load(configs, 0, tmp_path), 8))
    assert counts == {"a": 6, "b": 2}
