"""Sandboxes: what an untrusted process may see, reach and use, and cleaning up after it."""

from pathlib import Path

from loopwright.execution.sandbox.base import Bounds, NoSandbox, Sandbox, SandboxError, SandboxInstance
from loopwright.execution.sandbox.bubblewrap import Bubblewrap
from loopwright.execution.sandbox.docker import IMAGE, Docker

__all__ = ["Bounds", "NoSandbox", "Sandbox", "SandboxError", "SandboxInstance", "sandbox_of"]


def sandbox_of(name: str, bounds: Bounds = Bounds(), readable: tuple[Path, ...] = ()) -> Sandbox:  # noqa: B008  frozen
    """The sandbox called `none`, `bwrap`, `docker` or `docker:IMAGE`.

    `readable` are directories that commands may read besides the system, such as the one an agent is installed in.
    """
    kind, _, image = name.partition(":")
    if name == "none":
        return NoSandbox(bounds)
    if name == "bwrap":
        return Bubblewrap(bounds, readable)
    if kind == "docker":
        return Docker(bounds, readable, image or IMAGE)
    raise SandboxError(f"unknown sandbox {name!r}. Known: none, bwrap, docker.")
