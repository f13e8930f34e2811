"""`loopwright gateway serve`: what it refuses at the start, and how it ends."""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import Request, urlopen

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "scriptd"], "Did you mean 'scripted'?"),
        (["--engine", "scripted", "--host", "0.0.0.0"], "--advertise http://"),
        (["--engine", "scripted", "--host", "0.0.0.0", "--advertise", "http://box:1"], "--token-file"),
        (["--engine", "scripted", "--set", "keepalive=1"], "keepalive_s"),
        (["--engine", "scripted", "--set", "engine.slip=2"], "slip"),
        (["--engine", "scripted", "--set", "nonsense"], "NAME=VALUE"),
        (["--engine", "scripted", "--set", "gatway.port=0"], "gatway.port"),
        (["--engine", "scripted", "--log-prompts"], "--access-log"),
        (["--engine", "scripted", "--token-file", "none"], "cannot read none"),
        ([], "--engine NAME or --relay"),
        (["--relay"], "workers need a token"),
        (["--engine", "scripted", "--set", "fleet.wait_s=1"], "for several engines, or --relay"),
        (["--engine", "scripted", "-e", "scripted", "--set", "fleet.wait=1"], "wait_s"),
    ],
)
def test_bad_options_are_refused_at_once(loopwright, words, message):
    done = loopwright("gateway", "serve", *words)
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--connect", "http://box:1"], "ws://gateway:8400/ws/worker"),
        (["--connect", "ws://127.0.0.1:9/ws/worker", "--set", "port=1"], "engine.NAME=VALUE"),
    ],
)
def test_bad_options_of_a_worker_are_refused_at_once(loopwright, tmp_path, words, message):
    token = tmp_path / "token"
    token.write_text("a-token-of-the-gateway")
    done = loopwright("gateway", "worker", "--engine", "scripted", "--token-file", str(token), *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_several_engines_and_a_worker_with_another_token(tmp_path, loopwright):
    """Two engines serve as one; a worker that connects to a gateway without a relay gets the reason."""
    token = tmp_path / "token"
    token.write_text("a-token-of-the-gateway")
    words = ["gateway", "serve", "--engine", "scripted", "--engine", "scripted", "--port", "0", "--token-file", token]
    with subprocess.Popen(
        [sys.executable, "-m", "loopwright", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().split()[3].rstrip(";")
        headers = {"authorization": f"Bearer {token.read_text()}"}
        with urlopen(Request(f"{url}/engines", headers=headers)) as answer:
            names = [each["name"] for each in json.load(answer)["engines"]]
        assert names == ["scripted", "scripted#2"]
        door = f"{url.replace('http', 'ws')}/ws/worker"
        done = loopwright("gateway", "worker", "--connect", door, "--engine", "scripted", "--token-file", str(token))
        assert done.returncode == 1
        assert "start it with --relay" in done.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_it_serves_until_a_signal(tmp_path):
    words = ["gateway", "serve", "--engine", "scripted", "--port", "0", "--output", "gw"]
    command = [sys.executable, "-m", "loopwright", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "serving sessions at http://127.0.0.1:" in process.stdout.readline()
        busy = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert "another gateway uses gw" in busy.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == "loading engine 'scripted'\n"
    assert oct((tmp_path / "gw" / "gateway.db").stat().st_mode)[-3:] == "600"


def test_the_server_of_an_engine_is_asked_for_its_tokenizer(loopwright, tmp_path):
    """The model does not exist, so the error names the one looked for; without a server the option is missing."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"data": [{"id": "policy", "root": str(tmp_path / "no-such-model")}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        result = loopwright("gateway", "serve", "--engine", f"vllm:http://127.0.0.1:{server.server_port}")
        server.shutdown()
    without_server = loopwright("gateway", "serve", "--engine", f"vllm:http://127.0.0.1:{server.server_port}")
    assert "no-such-model" in result.stderr
    assert "set the tokenizer" in without_server.stderr
