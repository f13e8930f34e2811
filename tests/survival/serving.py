"""A gateway as a user has it: `loopwright gateway serve` in a process of its own, which can be killed."""

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
    """One process that serves."""

    command, said = COMMAND, r"serving sessions at (http://\S+);"

    def __init__(self, home, *words):
        self.home, self._log = Path(home), (Path(home) / "gateway.log").open("ab")
        command = [*self.command, *map(str, words)]
        self.process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=self._log, text=True)
        said = self.process.stdout.readline()
        found = re.search(self.said, said)
        if found is None:
            self.kill()
            raise AssertionError(said + (self.home / "gateway.log").read_text())
        self.address = found[1]

    def ask(self, method, path, body=None, key=None):
        """A request and its answer, as JSON."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def open(self, id=None, **terms):
        return self.ask("POST", "/sessions" if id is None else f"/sessions/{id}", terms)

    def shown(self, session):
        return self.ask("GET", f"/sessions/{session['id']}", key=session["key"])

    def kill(self):
        """As when the machine goes down."""
        self.process.kill()
        self._gone()

    def end(self):
        """As an orchestrator ends it: its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._gone()

    def _gone(self):
        code = self.process.wait(60)
        self.process.stdout.close()
        self._log.close()
        return code


@contextmanager
def serving(home, *words):
    gateway = Gateway(home, *words)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.kill()
