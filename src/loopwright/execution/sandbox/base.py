"""The base of all sandboxes: a room for one trial, in which its agent and then its tests run."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loopwright.core.errors import LoopwrightError
from loopwright.execution.base import Command


class SandboxError(LoopwrightError, OSError):
    """A sandbox that cannot be had on this machine, or that could not be set up."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all processes of a room may use; None for no limit."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None


class Room(ABC):
    """One trial's place. What a command leaves in it is there for the next, and gone with the room."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        """The directory that commands work in, as it is called outside."""

    @abstractmethod
    def command(self, command: Command) -> Command:
        """The command that runs this one inside. Its `directory` is the workspace or lies in it."""

    def inside(self, path: Path) -> str:
        """What a path in the workspace is called inside."""
        return str(path)

    def reachable(self, url: str) -> str:
        """What to call a URL inside that commands may reach."""
        return url


class Sandbox(ABC):
    """Makes rooms.

    async with sandbox.room(workspace, reach=("http://127.0.0.1:8400",)) as room:
        await executor.run(room.command(agent), started)
        await executor.run(room.command(tests), started)
    """

    def __init__(self, bounds: Bounds = Bounds()) -> None:  # noqa: B008  frozen
        self.bounds = bounds

    @abstractmethod
    def room(self, workspace: Path, *, reach: tuple[str, ...] = ()) -> AbstractAsyncContextManager[Room]:
        """A room over this directory; of the network only these URLs can be reached from it."""

    def check(self) -> None:
        """SandboxError, with the next move, if there can be no rooms here; called before anything starts."""


class _Open(Room):
    def command(self, command: Command) -> Command:
        return command


class NoSandbox(Sandbox):
    """No walls: for agents that are trusted as the user is."""

    @asynccontextmanager
    async def room(self, workspace: Path, *, reach: tuple[str, ...] = ()) -> AsyncIterator[Room]:
        yield _Open(workspace)


def sandbox_of(name: str, bounds: Bounds = Bounds()) -> Sandbox:  # noqa: B008  frozen
    """The sandbox of this name."""
    if name == "none":
        return NoSandbox(bounds)
    raise SandboxError(f"there is no sandbox {name!r}. Known: none.")
