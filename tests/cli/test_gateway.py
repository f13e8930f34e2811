"""`loopwright gateway serve`: what it refuses before anything starts, and how it ends."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "scriptd"], "Did you mean 'scripted'?"),
        (["--engine", "scripted", "--host", "0.0.0.0"], "--advertise http://"),
        (["--engine", "scripted", "--host", "0.0.0.0", "--advertise", "http://box:1"], "--token-file"),
        (["--engine", "scripted", "--set", "keepalive=1"], "keepalive_s"),
        (["--engine", "scripted", "--set", "engine.slip=2"], "slip"),
        (["--engine", "scripted", "--set", "nonsense"], "NAME=VALUE"),
        (["--engine", "scripted", "--token-file", "none"], "cannot read none"),
    ],
)
def test_what_cannot_work_is_said_at_once(loopwright, words, said):
    done = loopwright("gateway", "serve", *words)
    assert done.returncode in (1, 2)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_it_serves_until_it_is_told_to_end(tmp_path):
    words = ["gateway", "serve", "--engine", "scripted", "--port", "0", "--output", "gw"]
    command = [sys.executable, "-m", "loopwright", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "serving sessions at http://127.0.0.1:" in process.stdout.readline()
        busy = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert "another gateway works in gw" in busy.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == "loading engine 'scripted'\n"
    assert oct((tmp_path / "gw" / "gateway.db").stat().st_mode)[-3:] == "600"
