"""`loopwright doctor`: what works here, with the fix for what does not."""

import json
import os
import subprocess
import sys


def test_every_line_has_a_state_and_every_bad_line_a_fix(loopwright):
    done = loopwright("doctor", "--json")
    findings = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    names = "python|output directory|locks|ledger|file system|disk|clock|sandbox disk bound|slurm|ray"
    assert {*names.split("|")} <= findings.keys()
    assert all(line["fix"] for line in findings.values() if not line["ok"])
    assert done.returncode == (1 if any(line["needed"] and not line["ok"] for line in findings.values()) else 0)


def test_a_broken_output_directory_exits_with_1_and_says_why(loopwright):
    done = loopwright("doctor", "--output", "/proc/nowhere")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "choose another --output" in " ".join(done.stdout.split())


def test_an_unknown_need_is_a_usage_error(loopwright):
    assert loopwright("doctor", "--need", "slrum").returncode == 2


def test_an_engine_without_its_packages_is_a_bad_line(tmp_path):
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *p: None if n == 'torch' else f(n, *p)"
    (tmp_path / "sitecustomize.py").write_text(hide)
    command = [sys.executable, "-m", "loopwright", "doctor", "--json"]  # a new interpreter
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    findings = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert "loopwright[train]" in findings["engine transformers"]["detail"]
    assert not findings["engine transformers"]["ok"]
    assert findings["engine scripted"]["ok"]


def test_an_address_that_no_run_could_use_is_a_bad_line(loopwright, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    done = loopwright("doctor", "--json", "--need", "ray")
    findings = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, findings["ray"]["ok"]) == (1, False)
    assert "does not use Ray Client" in findings["ray"]["detail"]
