"""Tasks, as the rows of a dataset describe them."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.task import Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def test_a_text_becomes_the_users_message_and_other_columns_are_kept():
    task = Task.of({"prompt": "2+2=", "label": 4, "level": "easy"}, id="sums/0", data_source="sums")
    assert task == Task("sums/0", ({"role": "user", "content": "2+2="},), 4, "sums", {"level": "easy"})


def test_a_row_may_set_its_id_and_source():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    task = Task.of({"messages": messages, "id": 7, "data_source": "talk"}, id="x", data_source="y")
    assert (task.id, task.data_source, task.messages) == ("7", "talk", tuple(messages))


def test_a_null_in_a_table_is_ignored():
    row = {"prompt": "Hi", "messages": None, "id": None, "data_source": None, "label": None}
    assert Task.of(row, id="t/3", data_source="t") == Task("t/3", ({"role": "user", "content": "Hi"},), None, "t")


@pytest.mark.parametrize(
    "row",
    [{}, {"prompt": None}, {"prompt": 3}, {"prompt": []}, {"prompt": ["hi"]}, {"prompt": [{"role": "user"}]},
     {"prompt": [{"role": 1, "content": ""}]}, {"prompt": b"hi"}, {"messages": {"role": "user", "content": ""}}],
)  # fmt: skip
def test_a_row_without_a_prompt_is_refused(row):
    with pytest.raises(ValueError, match="a task needs `prompt`"):
        Task.of(row, id="t")


def test_messages_are_copies():
    message = {"role": "user", "content": "a"}
    task = Task.of({"prompt": [message]}, id="t")
    message["content"] = "b"
    assert task.messages[0]["content"] == "a"


@given(st.text(), JSON, st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_a_task_survives_json(prompt, label, extra):
    task = Task("t", ({"role": "user", "content": prompt},), label, "s", extra)
    assert Task.from_json(orjson.loads(orjson.dumps(task.as_json()))) == task
