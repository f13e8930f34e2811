"""What the documentation names exists: files, targets, benchmarks and, in docs/contracts.md, code and tests."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
from benchmarks.__main__ import LONG, NAMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "loopwright"
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRACTS = ROOT / "docs" / "contracts.md"
PATH = re.compile(r"(?<![\w/.])(?:benchmarks|deploy|docs|examples|tests/\w+)/[\w./*{},-]*[\w*}]")
CREATED = "examples/verl/data/"
"""What a command of the documentation writes."""
CODE = re.compile(r"`([^`\n]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_targets_and_benchmarks_exist(page):
    text = page.read_text()
    for path in PATH.findall(text):
        assert list(expanded(ROOT, path)) or path.startswith(CREATED), path
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", text)) <= {*NAMES, *LONG}


def rows() -> list[list[str]]:
    """The rows of docs/contracts.md: number, what holds, code, tests."""
    lines = [line for line in CONTRACTS.read_text().splitlines() if re.match(r"\| [A-Z]\d\d ", line)]
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines]


def expanded(directory: Path, path: str) -> Iterator[Path]:
    """The files of a path that may contain `*` or alternatives in braces."""
    if braces := re.search(r"\{([^}]+)\}", path):
        for alternative in braces[1].split(","):
            yield from expanded(directory, path[: braces.start()] + alternative + path[braces.end() :])
    else:
        yield from directory.glob(path)


@cache
def words(path: Path) -> frozenset[str]:
    """Every word of a file, or of the Python files of a directory."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_code_of_a_contract_exists(row):
    """A file is followed by names in it; a directory by files or names in it."""
    places: list[Path] = []
    for word in CODE.findall(row[2]):
        relative = [path for place in places if place.is_dir() for path in expanded(place, word)]
        if found := [*expanded(PACKAGE, word), *expanded(ROOT, word)]:
            places = found
        else:
            known = {each for place in places for each in words(place)}
            assert relative or set(word.split(".")) <= known, f"{word} is not in {places or row[2]}"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_tests_of_a_contract_exist(row):
    known = words(TESTS) | words(PACKAGE / "testing") | words(ROOT / "benchmarks")
    for word in CODE.findall(row[3]):
        if word.startswith(("make ", "benchmarks ")):
            continue
        if "/" in word or word.endswith(".py"):
            places = [ROOT, TESTS / "contracts", TESTS / "engines", PACKAGE]
            assert any(list(expanded(place, word)) for place in places), word
        else:
            assert any(fnmatchcase(name, word) for name in known), word
