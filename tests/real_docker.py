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
    """The files of the base image, made once: Debian with Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright" / "tests"
    file = cache / "bookworm-python.tar"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"bookworm-{os.getpid()}.tar"
        packages = "--include=ca-certificates,python3-minimal,procps"
        subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", partial], check=True)
        partial.rename(file)
    return file


@contextmanager
def docker_daemon():
    """The address of a daemon that has IMAGES. It is stopped by its process id, and its containers with it."""
    tar = base_image()
    root = Path(tempfile.mkdtemp(prefix="dockerd-"))  # a socket's path must be short
    address = f"unix://{root}/docker.sock"
    places = ["--data-root", root / "data", "--exec-root", root / "exec", "--pidfile", root / "pid"]
    with (root / "log").open("wb") as log:
        daemon = subprocess.Popen(["dockerd", "-H", address, *places], stdout=log, stderr=log)

    def docker(*arguments):
        argv = ["docker", "-H", address, *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    try:
        deadline = time.monotonic() + _START_S
        while docker("version").returncode:
            is_up = daemon.poll() is None and time.monotonic() < deadline
            assert is_up, (root / "log").read_text()[-2000:]
            time.sleep(0.2)
        assert docker("import", str(tar), IMAGES[0]).returncode == 0
        for name in IMAGES[1:]:
            docker("tag", IMAGES[0], name)
        yield address
        if names := docker("ps", "--all", "--quiet").stdout.split():
            docker("rm", "--force", *names)
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        with suppress(OSError):
            shutil.rmtree(root)
