"""A gateway as a user runs it: `loopwright gateway serve` in a separate process that can be killed."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

COMMAND = (str(Path(sys.executable).with_name("loopwright")), "gateway", "serve")


class Gateway:
    """A process that serves."""

    command, announcement = COMMAND, r"serving sessions at (http://\S+);"

    def __init__(self, directory, *words):
        self.directory, self._log = Path(directory), (Path(directory) / "gateway.log").open("ab")
        command = [*self.command, *map(str, words)]
        self.process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=self._log, text=True)
        announcement = self.process.stdout.readline()
        match = re.search(self.announcement, announcement)
        if match is None:
            self.kill()
            raise AssertionError(announcement + (self.directory / "gateway.log").read_text())
        self.address = match[1]

    def ask(self, method, path, body=None, key=None):
        """A request and its answer, as JSON."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def open(self, id=None, **terms):
        return self.ask("POST", "/sessions" if id is None else f"/sessions/{id}", terms)

    def describe(self, session):
        return self.ask("GET", f"/sessions/{session['id']}", key=session["key"])

    def kill(self):
        """End it with SIGKILL, as when the machine goes down."""
        self.process.kill()
        self._wait()

    def end(self):
        """End it with SIGTERM, as an orchestrator does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self):
        code = self.process.wait(60)
        self.process.stdout.close()
        self._log.close()
        return code


@contextmanager
def serving(directory, *words):
    gateway = Gateway(directory, *words)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.kill()
