"""The base of all sandboxes: a room for one trial, in which its agent and then its tests run."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from loopwright.core.errors import LoopwrightError
from loopwright.execution.base import Command, Completion


class SandboxError(LoopwrightError, OSError):
    """A sandbox that cannot be had on this machine, or that could not be set up."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all processes of a room may use; None for no limit."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None


NO_MOUNTS: Mapping[str, Path] = MappingProxyType({})


class SandboxInstance(ABC):
    """One trial's place. What a command leaves in it is there for the next, and gone with the room.

    Commands run in it one after another, each to its end.
    """

    has_own_paths: ClassVar[bool] = False
    """Whether it has paths of its own, so that `mounts` and `at` are honoured; otherwise they are passed over."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        """The directory that commands work in, as it is called outside."""
        self.exceeded_limit: str | None = None
        """The bound for whose sake the room ended a command, in words; None if none was broken."""
        self._settled = False

    @abstractmethod
    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, fixed: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        """The command that runs this one inside. Its `directory` is the workspace or lies in it.

        `mounts` are directories that it, and no other command of the room, sees at these absolute paths, writable;
        `fixed` are others, read-only.
        """

    def begin_verification(self) -> None:
        """Say that the next command is to look at what the ones before have left, and is none of them.

        For it the disk bound counts from here, and no door is open. Measuring takes time: call it in a thread.
        """
        self.exceeded_limit, self._settled = None, True

    def is_trusted(self, directory: Path) -> bool:
        """Whether no command of the room can have put anything into this directory, a layer over /usr run_in_thread."""
        return any(directory.is_relative_to(place) for place in ("/usr", "/bin", "/sbin"))

    def path_inside(self, path: Path) -> str:
        """What a path in the workspace is called inside."""
        return str(path)

    def url_inside(self, url: str) -> str:
        """What to call a URL inside that commands may reach."""
        return url

    def setup_failed(self, completion: Completion) -> bool:
        """Whether the last command never began, since the room could not be set up. Its stderr says why."""
        return False


class Sandbox(ABC):
    """Makes rooms.

    async with sandbox.open(workspace, allowed_urls=("http://127.0.0.1:8400",)) as room:
        await executor.run(room.wrap(agent), started)
        await executor.run(room.wrap(tests), started)
    """

    def __init__(self, bounds: Bounds = Bounds()) -> None:  # noqa: B008  frozen
        self.bounds = bounds

    @abstractmethod
    def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
    ) -> AbstractAsyncContextManager[SandboxInstance]:
        """A room over this directory; of the network only these URLs can be reached from it.

        `at` is what the workspace is called inside, such as /app; without it, what it is called outside.
        The directories to `hide`, such as a task's with its tests and solution, are empty inside.
        """

    def check(self) -> None:
        """SandboxError, with the next move, if there can be no rooms here; called before anything starts."""


class _Open(SandboxInstance):
    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, fixed: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        return command

    def is_trusted(self, directory: Path) -> bool:
        return not directory.is_relative_to(self.workspace)


class NoSandbox(Sandbox):
    """No walls: for agents that are trusted as the user is."""

    @asynccontextmanager
    async def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
    ) -> AsyncIterator[SandboxInstance]:
        yield _Open(workspace)


def sandbox_of(name: str, bounds: Bounds = Bounds(), readable: tuple[Path, ...] = ()) -> Sandbox:  # noqa: B008  frozen
    """The sandbox of this name; `docker:IMAGE` names the image too.

    `readable` is what its rooms show besides the system, such as where an agent lives.
    """
    from loopwright.execution.sandbox.bubblewrap import Bubblewrap
    from loopwright.execution.sandbox.docker import IMAGE, Docker

    if name == "none":
        return NoSandbox(bounds)
    if name == "bwrap":
        return Bubblewrap(bounds, readable)
    kind, _, image = name.partition(":")
    if kind == "docker":
        return Docker(bounds, readable, image or IMAGE)
    raise SandboxError(f"there is no sandbox {name!r}. Known: none, bwrap, docker.")
