"""Every snippet in README.md and docs/ works: Python runs, scenarios load, commands and flags exist.

The blocks of a page run in order, in one directory that starts with the files of `tests/docs/files/common/` and
`tests/docs/files/<page>/`; README.md also has those of `examples/first/`. A block whose first line is a file name, such
as `# my_judge.py`, is also written to that file. A block that cannot run in a test says why in a comment above it:
`<!-- test: compile, needs a vLLM server -->`, or `parse` for TOML, which must then be right in its keys and names.
"""

import ast
import asyncio
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.main import get_command

import loopwright
from loopwright.cli import app

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "examples" / "first"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<rule>\w+)[^\n]*-->\n\n?)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Snippet:
    language: str
    text: str
    line: int
    rule: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1, match["rule"])
        for match in BLOCK.finditer(text)
    ]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A working directory from which modules can be imported; they are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem)
def test_every_snippet_works(page, directory):
    if page.stem == "README":
        shutil.copytree(FIRST, directory, dirs_exist_ok=True)
        shutil.copytree(FIRST, directory / "examples" / "first")
    for name in ("common", page.stem):
        if (files := Path(__file__).parent / "files" / name).is_dir():
            shutil.copytree(files, directory, dirs_exist_ok=True)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for snippet in snippets(page):
        place = f"{page.name}:{snippet.line}"
        match snippet.language:
            case "python":
                if name := re.match(r"# (\w+\.py)\b", snippet.text):
                    (directory / name[1]).write_text(snippet.text)
                source, flags = "\n" * (snippet.line - 1) + snippet.text, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                code = compile(source, str(page), "exec", flags)
                if snippet.rule is None:
                    result = eval(code, namespace)
                    if asyncio.iscoroutine(result):
                        asyncio.run(result)
            case "toml":
                check_scenario(snippet, directory, place)
            case "sh" | "bash" | "":
                check_commands(snippet.text, place)


def check_scenario(snippet: Snippet, directory: Path, place: str) -> None:
    """A whole scenario must load. A part of one must have no unknown key or name."""
    tables = tomllib.loads(snippet.text)
    if "project" in tables:
        return
    is_whole = isinstance(tables.get("run"), list) and snippet.rule != "parse"
    name = re.match(r"# ([\w.-]+\.toml)\n", snippet.text)
    path = directory / (name[1] if is_whole and name else "study.toml" if is_whole else "part.toml")
    text = snippet.text if "name" in tables else f'name = "study"\n{snippet.text}'
    path.write_text(text if is_whole else tomli_w.dumps(completed(tables)))
    try:
        loopwright.load(path)
    except loopwright.ScenarioError as error:
        if is_whole or re.search(r": unknown (?!argument \{)", str(error)):
            pytest.fail(f"{place}: {error}")


def completed(tables: dict[str, Any]) -> dict[str, Any]:
    """A part of a scenario as a scenario with one run; keys of [run.rollout] may be at the top."""
    run = tables.pop("run", {})
    [run] = run if isinstance(run, list) else [run]
    if rollout := {key: tables.pop(key) for key in ("tasks", "loop", "judger") if key in tables}:
        run["rollout"] = rollout
    return {"name": "part", **tables, "run": [{"name": "part", **run}]}


def check_commands(text: str, place: str) -> None:
    """Every `loopwright` command line names a verb and flags that exist."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # the output of a command
            continue
        if words[:1] != ["loopwright"]:
            continue
        command, rest = get_command(app), words[1:]
        while hasattr(command, "get_command") and rest:
            subcommand = command.get_command(None, rest[0])
            assert subcommand is not None, f"{place}: there is no command {rest[0]!r}"
            command, rest = subcommand, rest[1:]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            flag = word.partition("=")[0]
            assert not flag.startswith("-") or flag in options, f"{place}: {command.name} has no option {flag}"


def test_the_scenarios_of_the_readme_are_shipped_as_shown():
    for snippet in snippets(ROOT / "README.md"):
        if snippet.language == "toml":
            name = snippet.text.splitlines()[0].removeprefix("# ")
            assert (FIRST / name).read_text() == snippet.text
            loopwright.load(FIRST / name)
