"""Docker images of tasks: pulled by name, or built from a directory once for each of its contents."""

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopwright.core.errors import LoopwrightError
from loopwright.execution.sandbox.base import Image, ImageStore, SandboxError

_TIMEOUT_S = 120.0
_TRANSFER_TIMEOUT_S = 3600.0
_REPOSITORY = "loopwright-task"
_TAIL = 10
"""How many lines of a failed build an error shows."""


class ImageError(LoopwrightError, ValueError):
    """An image that cannot be pulled or built although the daemon works."""


class DockerImages(ImageStore):
    """The images of a Docker daemon."""

    def pull(self, name: str) -> Image:
        with _lock(name):
            if (image := _inspect(name)) is not None:
                return image
            done = run_docker("pull", "--quiet", name, timeout_s=_TRANSFER_TIMEOUT_S)
        return self._require(name, f"image {name} cannot be pulled", done)

    def build(self, directory: Path, digest: str) -> Image:
        name = f"{_REPOSITORY}:{digest}"
        with _lock(name):
            if (image := _inspect(name)) is not None:
                return image
            done = run_docker("build", "--tag", name, str(directory), timeout_s=_TRANSFER_TIMEOUT_S)
        return self._require(name, f"{directory / 'Dockerfile'} cannot be built", done)

    def copy_out(self, image: str, path: str, target: Path) -> None:
        created = run_docker("create", image, "/")
        if created.returncode:
            raise SandboxError(f"no container of {image} can be created: {created.stderr.strip()}")
        container = created.stdout.strip()
        try:
            done = run_docker("cp", f"{container}:{path}/.", str(target), timeout_s=_TRANSFER_TIMEOUT_S)
            is_missing = "could not find the file" in done.stderr.lower() or "no such" in done.stderr.lower()
            if done.returncode and not is_missing:
                raise SandboxError(f"{path} of {image} cannot be copied: {done.stderr.strip()}")
        finally:
            run_docker("rm", "--force", "--volumes", container)

    def _require(self, name: str, failure: str, done: subprocess.CompletedProcess[str]) -> Image:
        image = _inspect(name) if done.returncode == 0 else None
        if image is not None:
            return image
        output = "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-_TAIL:])
        # A daemon that has gone is not the task's fault.
        error = SandboxError if run_docker("version").returncode else ImageError
        raise error(f"{failure}: {output or 'no error message'}")


def _inspect(name: str) -> Image | None:
    done = run_docker("image", "inspect", "--format", "{{json .Config}}", name)
    if done.returncode:
        return None
    config = json.loads(done.stdout)
    variables = (variable.partition("=") for variable in config.get("Env") or ())
    return Image(name, config.get("WorkingDir") or "", {key: value for key, _, value in variables})


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold a lock on an image, against other threads and processes of this user."""
    file = Path(tempfile.gettempdir()) / f"loopwright-image-{os.getuid()}-{name.replace('/', '_')}.lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def run_docker(*arguments: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run the `docker` client; SandboxError if its daemon does not respond in time."""
    argv = ("docker", *arguments)
    environment = client_environment()
    try:
        return subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(
            f'sandbox = "docker": no response from its daemon within {timeout_s:g} s (docker {arguments[0]}). '
            'Restart it, or use "bwrap".'
        ) from error


def client_environment() -> dict[str, str]:
    """What the `docker` client needs to find its daemon; nothing that a task could have set."""
    names = (
        *("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"),
        "DOCKER_BUILDKIT",
    )
    return {name: os.environ[name] for name in names if name in os.environ}
