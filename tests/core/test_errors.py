"""The exception tree: each error extends a standard one, and its message names the fix."""

import ast
import errno
import re
from pathlib import Path

import pytest

from loopwright.core import errors
from loopwright.core.errors import (
    InvalidAction,
    LaunchError,
    LedgerError,
    LoopwrightError,
    MissingExtra,
    OutputBusy,
    Problem,
    ScenarioError,
    StorageError,
    did_you_mean,
    storage,
)


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (ScenarioError, ValueError),
        (MissingExtra, ImportError),
        (StorageError, OSError),
        (LedgerError, StorageError),
        (OutputBusy, StorageError),
        (LaunchError, RuntimeError),
        (InvalidAction, ValueError),
    ],
)
def test_an_error_is_also_the_standard_one(error, standard):
    assert issubclass(error, LoopwrightError)
    assert issubclass(error, standard)
    assert error.__name__ in errors.__doc__


def test_the_tree_shows_every_error_under_its_parent_with_its_file():
    package = Path(errors.__file__).parents[1]
    expected = {"LoopwrightError": ("", "core/errors.py")}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
                expected[node.name] = expected.get(node.name) or (node.bases[0].id, str(file.relative_to(package)))

    def is_error(name):
        return name == "LoopwrightError" or (name in expected and is_error(expected[name][0]))

    tree, line_of = {}, ["LoopwrightError", ""]
    for lead, name, rest in re.findall(r"^    ([│├└─ ]+) (\w+) (.*)$", errors.__doc__, re.MULTILINE):
        depth = len(lead) // 4
        line_of[depth + 1 :] = [name]
        file = re.search(r"\S+\.py$", rest)
        tree[name] = line_of[depth], file[0] if file else "core/errors.py"
    assert tree == {name: place for name, place in expected.items() if name != "LoopwrightError" and is_error(name)}


def test_a_scenario_error_has_a_line_for_each_problem_with_file_and_key():
    error = ScenarioError("study.toml", [Problem("[run.agent] type", "is missing."), Problem("", "cannot be read.")])
    assert str(error) == "study.toml: [run.agent] type: is missing.\nstudy.toml: cannot be read."


def test_a_missing_extra_names_the_pip_command():
    assert "pip install 'loopwright[gp]'" in str(MissingExtra("agent 'gp'", "gp"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, r"the disk is full\. Free some space"),
        (errno.EROFS, r"it is read-only\. Make it writable"),
        (errno.EEXIST, r"a file of this name exists\. Move the file"),
        (errno.EACCES, r"refused\. Make it writable"),
    ],
)
def test_a_path_that_cannot_be_written_is_named_with_the_next_step(code, words):
    with (
        pytest.raises(StorageError, match=rf"cannot write to out: {words}, or .*loopwright resume"),
        storage(Path("out")),
    ):
        raise OSError(code, "refused")


def test_our_own_errors_pass_through_storage_unchanged():
    with pytest.raises(LedgerError, match=r"^damaged$"), storage(Path("out")):
        raise LedgerError("damaged")


def test_a_misspelled_name_gets_a_suggestion():
    assert did_you_mean("tpee", ["grid", "tpe"]) == "Known: grid, tpe. Did you mean 'tpe'?"
    assert did_you_mean("xyz", ["grid"]) == "Known: grid."
    assert did_you_mean("xyz", []) == "None is known."
    many = did_you_mean("task-199x", [f"task-{n}" for n in range(200)])
    assert many.endswith("task-48, task-49 and 150 more. Did you mean 'task-199'?")
