"""The base of all sandboxes. One sandbox instance serves one trial: its agent and then its tests run in it."""

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import ClassVar

from loopwright.core.errors import LoopwrightError
from loopwright.execution.base import Command, Completion

NO_MOUNTS: Mapping[str, Path] = MappingProxyType({})
_SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")

# Reports outside how a command ended inside. It is a shell script because a shell starts in a millisecond. It leaves
# SIGTERM to the command inside, which gets it too, and ends by the signal that ended the command. Bubblewrap reads its
# arguments from file 3 ($0) and writes its status to file 4.
STATUS_WRAPPER = """
trap '' TERM
exec 5>&2 2>/dev/null
"$@" 2>&5 3<"$0" 4>"$0.status" 5>&-
code=$?
if [ $code -gt 128 ] && [ $code -le 192 ]; then
    ulimit -c 0
    trap - TERM
    kill -$((code - 128)) $$
fi
exit $code
"""


class SandboxError(LoopwrightError, OSError):
    """A sandbox that is not available on this machine, or could not be set up."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all processes of a sandbox may use together; None for no limit."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A container image that is available, and what it sets for the commands in it."""

    name: str
    workdir: str
    """Empty if it sets none."""
    env: Mapping[str, str]


class ImageStore(ABC):
    """Container images. Its methods take a while: call them in a thread."""

    @abstractmethod
    def pull(self, name: str) -> Image:
        """An image by its name, from its registry if it is not on this machine."""

    @abstractmethod
    def build(self, directory: Path, digest: str) -> Image:
        """The image of a directory with a Dockerfile. It is built once for each digest of the directory."""

    @abstractmethod
    def copy_out(self, image: str, path: str, target: Path) -> None:
        """Copy the contents of a directory of the image, if it exists, into a directory of this machine."""


class SandboxInstance(ABC):
    """The sandbox of one trial. What one command leaves in it is there for the next, and removed with the instance.

    Commands run one after another, each until it ends.
    """

    has_own_paths: ClassVar[bool] = False
    """Whether it has its own file system tree, so that `mounts` and `mount_at` take effect; otherwise they do not."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        """The directory that commands work in, by its path outside."""
        self._exceeded_limit: str | None = None
        self._verifying = False

    @property
    def exceeded_limit(self) -> str | None:
        """The bound for which a command was ended, in words; None if no bound was exceeded."""
        return self._exceeded_limit

    @abstractmethod
    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, read_only: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        """The command that runs this one inside. Its `directory` must be the workspace or lie in it.

        `mounts` maps absolute paths inside to directories that only this command sees, writable there; `read_only`
        does the same for directories that it cannot write to.
        """

    def begin_verification(self) -> None:
        """Prepare for a command that inspects what earlier ones left, such as tests.

        For that command the disk bound counts from now, and no URL can be reached. It measures the disk: call it in a
        thread.
        """
        self._exceeded_limit, self._verifying = None, True

    def is_trusted(self, directory: Path) -> bool:
        """Whether no command can have written to this directory, apart from a writable layer over /usr."""
        return any(directory.is_relative_to(path) for path in _SYSTEM_PATHS)

    def may_link_to(self, inside: PurePosixPath) -> bool:
        """Whether a link that a command left may lead to this path inside: one of the system's own files."""
        return self.is_trusted(Path(inside))

    def writable_directories(self) -> Mapping[str, Path]:
        """The directories that commands can write to and that survive a command: paths inside, and where they are."""
        return {self.path_inside(self.workspace): self.workspace}

    def path_outside(self, inside: PurePosixPath) -> Path | None:
        """Where a path inside is; None if no command can have put a link there."""
        for root, directory in self.writable_directories().items():
            if inside.is_relative_to(root):
                return directory / inside.relative_to(root)
        return None

    def path_inside(self, path: Path) -> str:
        """The path inside of a path in the workspace."""
        return str(path)

    def url_inside(self, url: str) -> str:
        """The URL by which commands reach an allowed URL."""
        return url

    def setup_failed(self, completion: Completion) -> bool:
        """Whether the last command never started because the sandbox could not be set up, or was cut off by its end.

        The command's stderr says why. Call it in a thread.
        """
        return False

    def is_ruined(self) -> bool:
        """Whether the last command could not be set up because of what earlier ones left. It runs a command."""
        return False

    def has_changed_system(self) -> bool:
        """Whether commands changed programs or settings of the system that the next one uses."""
        return False


class Sandbox(ABC):
    """Opens sandbox instances.

    async with sandbox.open(workspace, allowed_urls=("http://127.0.0.1:8400",)) as instance:
        await executor.run(instance.wrap(agent), on_start)
        await executor.run(instance.wrap(tests), on_start)
    """

    images: ClassVar[ImageStore | None] = None
    """The images that commands can run in; None if they run on this machine's programs."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:  # noqa: B008  frozen
        self.bounds = bounds

    @asynccontextmanager
    async def disk(self, directory: Path) -> AsyncIterator[Path]:
        """Where to create the workspace of one instance: `directory` itself, or a file system that is mounted below it.

        With the latter the kernel enforces the disk bound, for all that the instance can write to. Everything in it is
        gone with it.
        """
        yield directory

    @abstractmethod
    def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
        image: str | None = None,
    ) -> AbstractAsyncContextManager[SandboxInstance]:
        """An instance over this directory, from which only `allowed_urls` can be reached.

        `mount_at` is the workspace's path inside, such as /app; by default it is the path outside.
        Directories in `hide`, such as a task with its tests and solution, are empty inside.
        Commands run in `image`, which must come from `images`; by default in the sandbox's own.
        """

    def check(self) -> None:
        """Raise SandboxError, with a fix, if the sandbox is not available here. Called before anything starts."""


class _UnconfinedInstance(SandboxInstance):
    def wrap(
        self, command: Command, mounts: Mapping[str, Path] = NO_MOUNTS, read_only: Mapping[str, Path] = NO_MOUNTS
    ) -> Command:
        return command

    def is_trusted(self, directory: Path) -> bool:
        return not directory.is_relative_to(self.workspace)

    def may_link_to(self, inside: PurePosixPath) -> bool:
        return any(inside.is_relative_to(path) for path in (*_SYSTEM_PATHS, sys.prefix, sys.base_prefix))

    def path_outside(self, inside: PurePosixPath) -> Path | None:
        return Path(inside)


class NoSandbox(Sandbox):
    """No isolation: for agents that you trust as much as yourself."""

    @asynccontextmanager
    async def open(
        self,
        workspace: Path,
        *,
        allowed_urls: tuple[str, ...] = (),
        mount_at: str | None = None,
        hide: tuple[Path, ...] = (),
        image: str | None = None,
    ) -> AsyncIterator[SandboxInstance]:
        yield _UnconfinedInstance(workspace)
