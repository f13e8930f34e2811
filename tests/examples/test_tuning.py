"""The examples that tune real programs: they load, name what is missing, and (slow) end with a recommendation."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from benchmarks.servers import ENVIRONMENTS, missing

import loopwright as lw
from loopwright.core.errors import ScenarioError
from loopwright.scenario.load import load

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {
    "tuning/zstd.toml": "zstd",
    "tuning/sqlite.toml": "sqlite3",
    "tuning/redis.toml": "redis-server",
    "stopping/spirals.toml": "python3",
    "serving/llamacpp.toml": "python3",
}


@pytest.mark.parametrize(("example", "program"), PROGRAMS.items())
def test_an_example_loads_or_names_the_missing_program(example, program):
    if shutil.which(program) is not None:
        assert load(EXAMPLES / example).runs
        return
    with pytest.raises(ScenarioError, match=f"'{program}' is not on the PATH. Install it"):
        load(EXAMPLES / example)


def test_the_inference_server_says_what_to_install():
    server = [sys.executable, "-S", EXAMPLES / "serving/server.py", "--port", "1"]
    done = subprocess.run(server, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "llama.cpp is missing. Install it: " in done.stderr
    assert "-m pip install xllamacpp" in done.stderr


class _Completions(BaseHTTPRequestHandler):
    prompts: list[dict] = []  # noqa: RUF012

    def do_POST(self):
        self.prompts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("profile", "requests", "tokens"), [("chat", 8, 8), ("rewrite", 4, 16)])
def test_the_load_is_that_of_the_profile(profile, requests, tokens):
    _Completions.prompts.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        load = [sys.executable, EXAMPLES / "serving/load.py", "--profile", profile]
        try:
            done = subprocess.run(
                [*load, "--url", f"http://127.0.0.1:{server.server_port}"], capture_output=True, text=True, check=True
            )
        finally:
            server.shutdown()
            thread.join()
    result = json.loads(done.stdout)
    assert result["tokens_per_s"] > 0
    assert result["p90_latency_s"] > 0
    asked = _Completions.prompts[1:]  # after the one that warms up
    assert [each["max_tokens"] for each in asked] == [tokens] * requests
    assert len({each["prompt"] for each in asked}) == requests


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("example", "program"), PROGRAMS.items())
def test_an_example_ends_with_a_confirmed_recommendation(example, program, tmp_path, monkeypatch):
    if example.startswith("serving"):
        if problem := missing("llamacpp"):
            pytest.skip(problem)
        monkeypatch.setenv("PATH", f"{ENVIRONMENTS / 'llamacpp/bin'}{os.pathsep}{os.environ['PATH']}")
    elif shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    study = lw.run(EXAMPLES / example, tmp_path / "out", progress=False)
    assert study.best.confirmed
    assert study.best.measurements > 1
