"""A Docker daemon for tests, on a socket of its own, with a base image made from Debian's packages."""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

IMAGES = ("python:3.11-slim", "python:3.12-slim", "debian:12-slim")
_TOOLS = ("docker", "dockerd", "mmdebstrap")
_START_S = 120.0


def missing_tools():
    """What a daemon cannot be started without here."""
    return [name for name in _TOOLS if shutil.which(name) is None] + ([] if os.geteuid() == 0 else ["root"])


def base_image():
    """The files of the base image, made once: Debian with Python and tmux."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright" / "tests"
    file = cache / "bookworm-python-tmux.tar"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"bookworm-{os.getpid()}.tar"
        packages = "--include=ca-certificates,python3-minimal,procps,tmux"
        subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", partial], check=True)
        partial.rename(file)
    return file


class DockerDaemon:
    """A daemon on a socket of its own that has IMAGES, and that can be killed and started again."""

    def __init__(self):
        self._root = Path(tempfile.mkdtemp(prefix="dockerd-"))  # a socket's path must be short
        self.address = f"unix://{self._root}/docker.sock"
        self._process = None

    def start(self):
        (self._root / "exec/containerd/containerd.pid").unlink(missing_ok=True)  # of one that was killed
        places = [
            "--data-root",
            self._root / "data",
            "--exec-root",
            self._root / "exec",
            "--pidfile",
            self._root / "pid",
        ]
        with (self._root / "log").open("ab") as log:
            self._process = subprocess.Popen(["dockerd", "-H", self.address, *places], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while self.docker("version").returncode:
            is_up = self._process.poll() is None and time.monotonic() < deadline
            assert is_up, (self._root / "log").read_text()[-2000:]
            time.sleep(0.2)

    def docker(self, *arguments):
        argv = ["docker", "-H", self.address, *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def kill(self):
        """Its containers stay until it starts again."""
        self._process.kill()
        self._process.wait()

    def stop(self):
        """By its process id, after its containers."""
        if names := self.docker("ps", "--all", "--quiet").stdout.split():
            self.docker("rm", "--force", *names)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        with suppress(OSError):
            shutil.rmtree(self._root)


@contextmanager
def docker_daemon():
    """A daemon while this is open."""
    tar, daemon = base_image(), DockerDaemon()
    daemon.start()
    try:
        assert daemon.docker("import", str(tar), IMAGES[0]).returncode == 0
        for name in IMAGES[1:]:
            daemon.docker("tag", IMAGES[0], name)
        yield daemon
    finally:
        daemon.stop()
