"""Files with columns of any names: JSON Lines, Parquet, and folders of Hugging Face datasets."""

import json
import sys

import pytest
from pydantic import ValidationError

from loopwright.core.config import explain
from loopwright.rollouts.tasks.files import DatasetsTasks, JsonlTasks, ParquetTasks
from loopwright.rollouts.tasks.sources import TasksError

ROWS = [{"question": "1+1=", "answer": "2", "level": 1}, {"question": "1+2=", "answer": "3", "level": 2}]
COLUMNS = {"prompt": "question", "label": "answer"}


def write_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_parquet(path, rows=ROWS):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def save_dataset(path, **splits):
    import datasets

    datasets.disable_progress_bars()
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    (datasets.DatasetDict(made) if len(made) > 1 else next(iter(made.values()))).save_to_disk(path)


def read(tasks):
    return [(task.messages[0]["content"], task.label, dict(task.extra)) for task in tasks]


EXPECTED = [("1+1=", "2", {"level": 1}), ("1+2=", "3", {"level": 2})]


@pytest.mark.parametrize(
    ("write", "source"),
    [
        (write_jsonl, JsonlTasks(path="sums", columns=COLUMNS)),
        (write_parquet, ParquetTasks(path="sums", columns=COLUMNS)),
        (lambda path: save_dataset(path, train=ROWS), DatasetsTasks(path="sums", columns=COLUMNS)),
        (
            lambda path: save_dataset(path, train=ROWS, test=ROWS[:1]),
            DatasetsTasks(path="sums", split="train", columns=COLUMNS),
        ),
        (lambda path: write_jsonl(path / "train.jsonl"), DatasetsTasks(path="sums", columns=COLUMNS)),
        (lambda path: write_jsonl(path / "data" / "train.jsonl"), DatasetsTasks(path="sums", columns=COLUMNS)),
    ],
    ids=["jsonl", "parquet", "saved dataset", "saved splits", "data file", "data directory"],
)
class TestNames:
    def test_columns_are_read_by_their_names(self, tmp_path, write, source):
        write(tmp_path / "sums")
        assert read(source.load(tmp_path)) == EXPECTED

    def test_an_unknown_column_is_answered_with_those_there_are(self, tmp_path, write, source):
        write(tmp_path / "sums")
        wrong = source.model_copy(update={"columns": {**COLUMNS, "label": "anser"}})
        (problem,) = wrong.problems(tmp_path)
        words = (
            "columns.label: there is no column 'anser'. Its columns: question, answer, level. Did you mean 'answer'?"
        )
        assert words in problem.message

    def test_without_columns_the_error_says_how_to_name_them(self, tmp_path, write, source):
        write(tmp_path / "sums")
        with pytest.raises(TasksError, match=r"Its columns are question, answer, level: .* columns = \{ prompt ="):
            source.model_copy(update={"columns": {}}).load(tmp_path)


class TestMeaning:
    def load(self, directory, row, **columns):
        write_jsonl(directory / "rows.jsonl", [row])
        (task,) = JsonlTasks(path="rows.jsonl", columns=columns).load(directory)
        return task

    def test_a_dot_leads_into_a_table(self, tmp_path):
        row = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "a.b": "3"}
        assert self.load(tmp_path, row, label="reward_model.ground_truth").label == "2"
        assert self.load(tmp_path, row, label="a.b").label == "3"
        with pytest.raises(TasksError, match=r"no column 'reward_model\.truth'"):
            self.load(tmp_path, row, label="reward_model.truth")

    def test_the_column_that_was_asked_for_wins(self, tmp_path):
        row = {
            "prompt": "old",
            "messages": [{"role": "user", "content": "older"}],
            "question": "new",
            "label": 1,
            "b": 2,
        }
        task = self.load(tmp_path, row, prompt="question", label="b")
        assert (task.messages[0]["content"], task.label, dict(task.extra)) == ("new", 2, {})

    def test_messages_id_and_data_source(self, tmp_path):
        row = {"chat": [{"role": "user", "content": "hi"}], "uid": 7, "kind": "math"}
        task = self.load(tmp_path, row, messages="chat", id="uid", data_source="kind")
        assert (task.messages, task.id, task.data_source) == (({"role": "user", "content": "hi"},), "7", "math")

    def test_a_field_that_does_not_exist_is_refused(self):
        with pytest.raises(ValidationError) as raised:
            JsonlTasks(path="rows.jsonl", columns={"promt": "question"})
        ((key, message),) = explain(raised.value, JsonlTasks)
        assert key == "columns.promt"
        assert message.startswith("must be 'prompt', 'messages'")


class TestDatasets:
    def test_several_splits_need_a_choice(self, tmp_path):
        save_dataset(tmp_path / "sums", train=ROWS, test=ROWS[:1])
        with pytest.raises(TasksError, match="several splits; set `split` to one of train, test"):
            DatasetsTasks(path="sums", columns=COLUMNS).load(tmp_path)
        with pytest.raises(TasksError, match=r"no split 'trian'.*Did you mean 'train'"):
            DatasetsTasks(path="sums", split="trian", columns=COLUMNS).load(tmp_path)
        assert len(DatasetsTasks(path="sums", split="test", columns=COLUMNS).load(tmp_path)) == 1

    def test_its_name_is_the_folders_and_the_splits(self):
        assert DatasetsTasks(path="data/gsm8k", split="train").label() == "gsm8k.train"

    def test_a_folder_that_is_missing_or_empty(self, tmp_path):
        with pytest.raises(TasksError, match="folder 'sums' not found"):
            DatasetsTasks(path="sums").load(tmp_path)
        (tmp_path / "sums").mkdir()
        with pytest.raises(TasksError, match="doesn't contain any data files"):
            DatasetsTasks(path="sums").load(tmp_path)

    def test_a_missing_package_names_the_extra(self, tmp_path, monkeypatch):
        (tmp_path / "sums").mkdir()
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(TasksError, match=r"pip install 'loopwright\[datasets\]'"):
            DatasetsTasks(path="sums").load(tmp_path)
