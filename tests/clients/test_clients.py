"""The client matrix: clients that nobody here wrote, each against a real gateway, and every token compared.

`make test-clients` installs them, runs them without a network, and writes the table of `docs/clients.md`.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, PROGRAMS, ROOT
from tests.clients.checker import check
from tests.clients.tap import tapping
from tests.survival.serving import serving

PAGE = ROOT / "docs" / "clients.md"
ENGINE = ("--engine", "scripted", "--set", "engine.slip=0", "--set", "engine.token_s=0.0002")


def cells(line):
    """The cells of a table's line."""
    return [cell.strip() for cell in line.strip("|\n").split(" | ")]


def rows():
    """The table of the page: the cells of each client, by its name and mode."""
    lines = [cells(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {(row[0], row[2]): row for row in lines[1:]}


@pytest.fixture(scope="module")
def table():
    """The results of this run, which replace those of earlier runs in the page."""
    results = {}
    yield results
    known = {**rows(), **results}
    lines = ["| " + " | ".join(known[client.key]) + " |" for client in CLIENTS if client.key in known]
    text = re.sub(r"(\|---[^\n]*\n)(?:\|[^\n]*\n)*", lambda head: head[1] + "\n".join(lines) + "\n", PAGE.read_text())
    PAGE.write_text(text)


def run(client, home, address, session):
    """Run a client, which gets only a URL and a key."""
    environment, work = ROOT / ".venvs" / client.environment, home / "work"
    work.mkdir()
    (work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    if (modules := environment / "node_modules").exists():
        (work / "node_modules").symlink_to(modules)
    for program in PROGRAMS.glob("*.*"):
        shutil.copy(program, work if program.suffix == ".mjs" else home)
    base = f"{address}/{session['id']}"
    env = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "NO_PROXY": "*",
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": session["key"],
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session["key"],
        **{name: value.format(home=home) for name, value in client.env.items()},
    }
    program, *arguments = (part.format(home=home, work=work, base=base) for part in client.command)
    command = [environment / program, *arguments]
    return subprocess.run(
        command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )


def failures(client, process, work):
    """What the client did not do."""
    if process.returncode:
        return [f"it exited with {process.returncode}: {process.stdout[-2000:]}{process.stderr[-4000:]}"]
    if not client.prints:
        return [] if "return a + b" in (work / "calc.py").read_text() else ["calc.py is as it was"]
    printed = tuple(json.loads(line) for line in process.stdout.splitlines())
    return [] if printed == client.prints else [f"it printed {printed}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
def test_a_client_works_and_is_captured_exactly(client, tmp_path, table):
    if not (ROOT / ".venvs" / client.environment / ".ready").exists():
        pytest.skip(f"{client.name} is not installed; run: make test-clients")
    shutil.copy(Path(__file__).with_name("policies.py"), tmp_path)
    script = f"engine.script=policies:{client.policy}"
    with (
        serving(tmp_path, *ENGINE, "--set", script, "--port", 0, "--output", "gw") as gateway,
        tapping(gateway.address) as (address, exchanges),
    ):
        session = gateway.open("client")
        process = run(client, tmp_path, address, session)
        record = gateway.describe(session)
    log, received = tmp_path / "engine.jsonl", tmp_path / "work" / "token_ids.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    capture = check(record, exchanges, entries, json.loads(received.read_text()) if received.exists() else None)
    broken = failures(client, process, tmp_path / "work")
    ignored = f"Ignored: {', '.join(f'`{name}`' for name in capture.ignored)}" if capture.ignored else ""
    table[client.key] = [
        client.name,
        client.version,
        client.mode,
        "no" if broken else "yes",
        "no" if capture.problems or broken else "yes",
        str(capture.branches),
        ". ".join(note for note in (client.note, ignored) if note),
    ]
    assert broken == []
    assert capture.problems == ()
    assert capture.branches == client.branches, capture.forks
    assert bool(capture.streams) == client.streams


def test_the_page_has_every_client_with_its_pinned_version():
    table = rows()
    assert [(key, row[1]) for key, row in table.items()] == [(client.key, client.version) for client in CLIENTS]
