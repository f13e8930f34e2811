"""A Harbor environment on this machine: bubblewrap instead of Docker, for tasks that need no image of their own.

    harbor run --path tasks/ --agent oracle --env loopwright.integrations.harbor_env:LocalEnvironment

It runs inside Harbor's own interpreter (Python 3.12 or newer) and imports nothing of ours.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_OWN = ("proc", "dev", "tmp", "run", "sys", "home", "root", "var")
"""What is not taken over from this machine."""
_WORKDIR = "/app"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A bare root with this machine's programs to read, and directories of its own for everything that is written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="loopwright-harbor-"))
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "loopwright-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if shutil.which("bwrap") is None:
            raise FileNotFoundError("this environment needs bubblewrap. Run: apt-get install bubblewrap")
        if (self.environment_dir / "Dockerfile").exists():
            raise ValueError(f"{self.environment_dir / 'Dockerfile'} needs an environment that can build images")

    async def start(self, force_build: bool) -> None:
        self.logger.debug(f"nothing is built here (force_build={force_build}): the programs are this machine's")
        for place in (self._workdir, "/tmp", "/root", "/logs", "/tests", "/solution"):  # noqa: S108  These are inside.
            self._outside(place).mkdir(parents=True, exist_ok=True)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._outside(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._outside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._outside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._outside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self._resolve_user(user) not in (None, "root", 0):
            raise ValueError(f"there is one user in here, and it is not {user!r}")
        process = await asyncio.create_subprocess_exec(
            *self._bwrap(cwd or self._workdir),
            *("bash", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **(self._merge_env(env) or {})},
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            # Its first process holds the room: with that one all others end.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return ExecResult(
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            return_code=process.returncode or 0,
        )

    @property
    def _workdir(self) -> str:
        return str(self.task_env_config.workdir or _WORKDIR)

    def _outside(self, path: str) -> Path:
        inside = PurePosixPath("/") / path
        if ".." in inside.parts:
            raise ValueError(f"{path!r} leaves its place")
        return self._root / inside.relative_to("/")

    def _bwrap(self, cwd: str) -> Iterator[str]:
        yield from ("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc")
        if self._network_disabled:
            yield "--unshare-net"
        yield from ("--tmpfs", "/")
        own = {entry.name for entry in self._root.iterdir()}
        for entry in sorted(Path("/").iterdir()):
            if entry.name not in own and entry.name not in _OWN:
                if entry.is_symlink():
                    yield from ("--symlink", str(entry.readlink()), str(entry))
                elif entry.is_dir():
                    yield from ("--ro-bind", str(entry), str(entry))
        for name in sorted(own):
            yield from ("--bind", str(self._root / name), f"/{name}")
        yield from ("--proc", "/proc", "--dev", "/dev", "--chdir", cwd)
