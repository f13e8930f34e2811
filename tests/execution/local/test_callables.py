"""Inspecting a callable: its signature, or what is wrong with it, without calling it."""

import os
from pathlib import Path

import pytest

from loopwright.execution.local.callables import inspect_callable

MODULE = """
def say(text, error=""): return {}
class Tool:
    @staticmethod
    def use(**anything): return {"n": len(anything)}
number = 3
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "tasks.py").write_text(MODULE)
    (folder / "dies.py").write_text("import os; os._exit(4)")
    (folder / "broken.py").write_text("import no_such_module_at_all")
    (folder / "slow.py").write_text("import time; time.sleep(100)")
    return folder


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tasks", "is not of the form"),
        ("nowhere:f", "No module named 'nowhere'"),
        ("broken:f", "no_such_module_at_all"),
        ("tasks:squar", "has no 'squar'. It has:"),
        ("tasks:number", "is a int, not a callable"),
        ("dies:f", "ended the process: exit code 4"),
    ],
)
def test_problems_are_described(code, name, problem):
    assert problem in inspect_callable(name, (code,), dict(os.environ)).problem


def test_a_slow_import_is_a_problem(code):
    assert "longer than 0.5 s" in inspect_callable("slow:f", (code,), dict(os.environ), deadline_s=0.5).problem


def test_the_signature_is_read(code):
    signature = inspect_callable("tasks:say", (code,), dict(os.environ))
    assert (signature.problem, signature.accepts, signature.requires, signature.accepts_any) == (
        None,
        ("text", "error"),
        ("text",),
        False,
    )
    assert signature.unknown(["text", "x"]) == ["x"]
    assert signature.missing(["error"]) == ["text"]
    assert inspect_callable("tasks:Tool.use", (code,), dict(os.environ)).unknown(["x"]) == []
