"""A trial server in a separate process, for tests."""

import json
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.rollouts.remote.agents import CHAT
from tests.survival.serving import COMMAND, Gateway

ENGINE_ARGS = ("--engine", "scripted", "--set", 'engine.replies=["yes"]', "--set", "engine.slip=0")


class TrialServerProcess(Gateway):
    """`loopwright trials serve`; its agents execute their argument."""

    command, announcement = (
        (COMMAND[0], "trials", "serve", "--port", "0", "-o", "out"),
        r"serving trials at (http://\S+),",
    )

    def __init__(self, directory, *arguments):
        (directory / "agent.py").write_text(CHAT + "exec(sys.argv[1])")
        super().__init__(directory, *arguments)
        self.token = (directory / "out" / "token").read_text()

    def loop(self, text, **settings):
        text = text.replace("{", "{{").replace("}", "}}")
        return {"command": [sys.executable, "{home}/agent.py", text], "deadline_s": 60, **settings}

    def submit(self, key, text, *, headers=None, loop=None, **more):
        task = {"id": "t", "prompt": "What is it?"}
        body = {"key": key, "task": task, "loop": self.loop(text, **loop or {}), **more}
        return self.ask("POST", "/trials", body, self.token)

    def status(self, trial, **query):
        parameters = "&".join(f"{name}={value}" for name, value in query.items())
        return self.ask("GET", f"/trials/{trial['id']}?{parameters}", key=self.token)

    def wait(self, trial):
        """The trial's entry, once its status is final."""
        while (entry := self.status(trial, wait_s=30))["status"] in ("queued", "running"):
            pass
        return entry

    def result(self, trial):
        assert self.wait(trial)["status"] == "ended"
        return self.ask("GET", f"/trials/{trial['id']}/result", key=self.token)

    def cancel(self, trial):
        return self.ask("POST", f"/trials/{trial['id']}/cancel", key=self.token)

    def refusal(self, *request, **options):
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.ask(*request, **options)
        with raised.value as error:
            return error.code, error.headers, json.loads(error.read())["error"]


@contextmanager
def serve(directory, *arguments):
    server = TrialServerProcess(directory, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def held_agent(directory, name):
    """The code of an agent that waits for a file `go` after its start, and a function that counts its starts."""
    start = f"open({str(directory / name)!r}, 'a').write('x')"
    wait = f"while not os.path.exists({str(directory / 'go')!r}): time.sleep(0.01)"
    log = directory / name
    return f"{start}\n{wait}\nchat()", lambda: len(log.read_text()) if log.exists() else 0
