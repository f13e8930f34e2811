"""A Harbor environment on this machine: bubblewrap instead of Docker, for tasks without an image.

    harbor run --path tasks/ --agent oracle --env loopwright.integrations.harbor_env:LocalEnvironment

It runs in Harbor's interpreter (Python 3.12 or newer) and imports nothing else from Loopwright. Files are copied from
inside the sandbox, so that an agent's symlinks cannot point outside. CPU, memory and disk are not limited.
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

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store", "gnu/store")
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "localtime", "mime.types", "alternatives"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "bash.bashrc"),
)
"""The files of this machine that are visible in the sandbox."""
_ISOLATION = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session"),
)
_MOUNT = "/.loopwright"
"""Where the source or target of a copy is mounted."""
_MAX_OUTPUT = 8 << 20
_UPLOAD_FILE = f'mkdir -p -- "${{1%/*}}" && cp -pT --remove-destination {_MOUNT} "$1"'
_UPLOAD_DIR = f'mkdir -p -- "$1" && tar -C {_MOUNT} -c . | tar -C "$1" -xp --no-same-owner'
_DOWNLOAD_FILE = f'[ -f "$1" ] && [ ! -L "$1" ] && cp -pT -- "$1" "{_MOUNT}/$2"'
_DOWNLOAD_DIR = f'cd -- "$1" && find . -type f -exec cp -p --parents -t {_MOUNT} {{}} +'
_WORKDIR = "/app"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """An empty root with this machine's programs, read-only, and private directories for everything that is written."""

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
        self.logger.debug(f"nothing to build (force_build={force_build}): programs come from this machine")
        for directory in (self._workdir, "/tmp", "/root", "/logs", "/tests", "/solution"):  # noqa: S108  inside the sandbox
            (self._root / directory.strip("/")).mkdir(parents=True, exist_ok=True)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._copy(_UPLOAD_FILE, "--ro-bind", Path(source_path), self._prepare(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._copy(_UPLOAD_DIR, "--ro-bind", Path(source_dir), self._prepare(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        await self._copy(_DOWNLOAD_FILE, "--bind", _directory(target.parent), str(_inside(source_path)), target.name)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._copy(_DOWNLOAD_DIR, "--bind", _directory(Path(target_dir)), str(_inside(source_dir)))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self._resolve_user(user) not in (None, "root", 0):
            raise ValueError(f"the sandbox has only the user root, not {user!r}")
        variables = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **(self._merge_env(env) or {})}
        return await self._run([*self._bwrap(cwd or self._workdir), "bash", "-c", command], variables, timeout_sec)

    async def _run(self, argv: list[str], env: dict[str, str], timeout_s: float | None = None) -> ExecResult:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await asyncio.gather(*map(_read, filter(None, (process.stdout, process.stderr))))
                await process.wait()
        except BaseException:
            # All processes of the sandbox end with its first one.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return ExecResult(stdout=stdout, stderr=stderr, return_code=process.returncode or 0)

    async def _copy(self, script: str, bind: str, outside: Path, *words: str) -> None:
        """Copy inside the sandbox, where symlinks reach only the sandbox and `outside`."""
        argv = [*self._bwrap("/", bind, outside), "bash", "-c", script, "copy", *words]
        result = await self._run(argv, {"PATH": _PATH})
        if result.return_code:
            raise OSError(f"{' '.join(words)} cannot be copied: {result.stderr.strip()}")

    def _prepare(self, path: str) -> str:
        """A path inside, whose top directory exists in the sandbox."""
        inside = _inside(path)
        (self._root / inside.parts[1]).mkdir(exist_ok=True)
        return str(inside)

    @property
    def _workdir(self) -> str:
        return str(self.task_env_config.workdir or _WORKDIR)

    def _bwrap(self, cwd: str, bind: str = "", outside: Path = Path()) -> Iterator[str]:
        yield from ("bwrap", *_ISOLATION, "--tmpfs", "/")
        if self._network_disabled:
            yield "--unshare-net"
        own = {entry.name for entry in self._root.iterdir()}
        for name in (*_SYSTEM, *(f"etc/{name}" for name in _ETC)):
            path = Path("/", name)
            if path.parts[1] not in own:
                if path.is_symlink() and len(path.parts) == 2:
                    yield from ("--symlink", str(path.readlink()), str(path))
                elif path.exists():
                    yield from ("--ro-bind", str(path), str(path))
        for name in sorted(own):
            yield from ("--bind", str(self._root / name), f"/{name}")
        if bind:
            yield from (bind, str(outside.absolute()), _MOUNT)
        yield from ("--proc", "/proc", "--dev", "/dev", "--chdir", cwd)


def _inside(path: str) -> PurePosixPath:
    inside = PurePosixPath("/") / path
    if ".." in inside.parts or len(inside.parts) == 1:
        raise ValueError(f"{path!r} is not a path inside the sandbox")
    return inside


def _directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


async def _read(stream: asyncio.StreamReader) -> str:
    """Read all of it; returns the beginning as text."""
    output = bytearray()
    while part := await stream.read(1 << 16):
        output += part[: _MAX_OUTPUT - len(output)]
    return output.decode(errors="replace")
