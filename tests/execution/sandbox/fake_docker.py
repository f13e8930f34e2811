"""A fake Docker: its daemon runs commands unchanged, and they outlive the `docker` client that started them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

IMAGE = "python:3.11-slim"
CLIENT = """
import json, socket, sys
daemon = socket.socket(socket.AF_UNIX)
daemon.connect(sys.argv[1])
socket.send_fds(daemon, [json.dumps(sys.argv[2:]).encode() + b"\\n"], [1, 2])
sys.exit(int(daemon.recv(16) or b"125"))
"""


class FakeDocker:
    """The daemon, as threads of the test. Containers see the file system of this machine, but not its environment."""

    def __init__(self, home):
        (home / "client.py").write_text(CLIENT)
        tool = home / "docker"
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -I {home}/client.py {home}/daemon "$@"\n')
        tool.chmod(0o755)
        self.requests = []
        self.containers = {}
        """By name: labels, and the process."""
        self._exit_codes = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(home / "daemon"))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def calls(self, *names):
        """The requests for these subcommands."""
        return [words for words in self.requests if words[0] in names]

    def running(self):
        return [name for name, (_, process) in self.containers.items() if process.poll() is None]

    def start_orphan(self, name, **labels):
        """Start a container whose client is gone."""
        self.containers[name] = (labels, subprocess.Popen(["sleep", "1000"], start_new_session=True))

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._remove(list(self.containers))

    def _serve(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client):
        words, files, _, _ = socket.recv_fds(client, 1 << 16, 2)
        while not words.endswith(b"\n"):
            words += client.recv(1 << 16)
        words = json.loads(words)
        self.requests.append(words)
        try:
            code = getattr(self, f"_{words[0]}", lambda *_: 0)(words[1:], *files)
        finally:
            for file in files:
                os.close(file)
        with suppress(OSError):  # the client was killed; its container continues
            client.sendall(str(code).encode())
        client.close()

    def _run(self, words, stdout, stderr):
        position = next(n for n, word in enumerate(words) if word == IMAGE or word.startswith("loopwright-state:"))
        options, argv = words[:position], words[position + 1 :]
        mounts = [dict(part.partition("=")[::2] for part in word.split(",")) for word in options if "--mount=" in word]
        sources = {mount["target"]: mount["source"] for mount in mounts}
        environment, workdir = {}, None
        if "--env-file" in options:
            lines = Path(options[options.index("--env-file") + 1]).read_text().splitlines()
            environment = dict(line.split("=", 1) for line in lines)
            workdir = sources[options[options.index("--workdir") + 1]]
        argv = [sys.executable if word == "python3" else sources.get(word, word) for word in argv]
        if "--detach" in options:
            stdout = stderr = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, cwd=workdir, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        labels = dict(word.split("=", 2)[1:] for word in options if word.startswith("--label="))
        name = options[options.index("--name") + 1]
        self.containers[name] = (labels, process)
        if "--cidfile" in options:
            Path(options[options.index("--cidfile") + 1]).write_text(name)
        if "--detach" in options:
            return 0
        code = process.wait()
        self.containers.pop(name, None)
        self._exit_codes[name] = code if code >= 0 else 128 - code
        return self._exit_codes[name]

    def _inspect(self, words, stdout, stderr):
        if "ExitCode" in words[1] and words[2] in self._exit_codes:
            os.write(stdout, f"exited {self._exit_codes[words[2]]}\n".encode())
        return 0

    def _ps(self, words, stdout, stderr):
        kind, _, value = words[words.index("--filter") + 1].partition("=")
        for name, (labels, process) in list(self.containers.items()):
            if kind == "label" and value in [f"{key}={text}" for key, text in labels.items()]:
                os.write(stdout, f"{name} {labels['loopwright.owner']}\n".encode())
            elif kind == "name" and value == f"^{name}$" and process.poll() is None:
                os.write(stdout, f"{name}\n".encode())
        return 0

    def _rm(self, words, stdout, stderr):
        return self._remove([word for word in words if not word.startswith("--")])

    def _remove(self, names):
        for _, process in filter(None, (self.containers.pop(name, None) for name in names)):
            with suppress(ProcessLookupError):  # already ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 0


def write_script(path, script):
    """A program that is this shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
