"""A Harbor environment on this machine: bubblewrap instead of Docker, for tasks that need no image.

    harbor run --path tasks/ --agent oracle --env loopwright.integrations.harbor_env:LocalEnvironment

It runs in Harbor's interpreter (Python 3.12 or newer) and imports nothing else from Loopwright. One sandbox lasts from
`start` to `stop`: what a command leaves running, such as the tmux server of terminus-2, is there for the next one.
Files are copied through pipes, so that an agent's symlinks cannot point outside. CPU, memory and disk are not limited.
"""

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_TOOLS = {"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux", "tar": "tar"}
"""The programs that this needs, and the Debian packages that contain them."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store", "gnu/store")
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "localtime", "mime.types", "alternatives"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "bash.bashrc"),
)
"""The files of this machine that are visible in the sandbox."""
_ISOLATION = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
    *("--new-session", "--as-pid-1"),
)
_NAMESPACES = {"user": "user", "mount": "mnt", "pid": "pid", "ipc": "ipc", "uts": "uts", "net": "net"}
"""The namespaces that commands enter: names of nsenter's options, and of files in /proc."""
# Runs as process 1: it adopts daemons, cannot be killed from inside, and ends with us, which closes its input.
_INIT = "trap '' HUP INT QUIT TERM USR1 USR2 ALRM PIPE; echo ready; while read -r _; do :; done"
_READY = b"ready\n"
_GRACE_S = 0.5
"""Seconds to read the rest of a command's output if a daemon that it started keeps the pipe open."""
_MAX_OUTPUT = 8 << 20
_UPLOAD_FILE = 'mkdir -p -- "${1%/*}" && rm -f -- "$1" && cat > "$1" && chmod "$2" -- "$1"'
_UPLOAD_DIR = 'mkdir -p -- "$1" && tar -C "$1" -xp --no-same-owner'
_DOWNLOAD_FILE = '[ -f "$1" ] && [ ! -L "$1" ] && cat -- "$1"'
# Files from 1 GiB are left out: a sparse one would fill our disk.
_DOWNLOAD_DIR = (
    'cd -- "$1" && find . -type f -size -1048576k -print0 | tar -c --null --no-recursion --hard-dereference -T -'
)
_WORKDIR = "/app"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """This machine's programs, read-only, over a private root directory that everything else is written to."""

    variables: Mapping[str, str] = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    """What each command has in its environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="loopwright-harbor-"))
        self._session: subprocess.Popen[bytes] | None = None
        self._namespaces: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "loopwright-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"this environment needs {tool}. Run: apt-get install {package}")
        if (self.environment_dir / "Dockerfile").exists():
            raise ValueError(f"{self.environment_dir / 'Dockerfile'} needs an environment that can build images")
        toml = self.environment_dir.parent / "task.toml"
        metadata = tomllib.loads(toml.read_text()).get("metadata", {}) if toml.exists() else {}
        if (image := self.task_env_config.docker_image) and metadata.get("needs_image") is not False:
            raise ValueError(
                f"{toml}: environment.docker_image: {image!r} needs an environment that can run images, or set "
                "needs_image = false in the task's [metadata] if any machine's programs will do"
            )

    async def start(self, force_build: bool) -> None:
        self.logger.debug(f"nothing to build (force_build={force_build}): programs come from this machine")
        for directory in (self._workdir, "/tmp", "/root", "/logs", "/tests", "/solution"):  # noqa: S108  inside the sandbox
            (self._root / directory.strip("/")).mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._open_session)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self._session is not None:
            # Process 1 ends when its input does, and all others with it.
            await asyncio.to_thread(self._session.communicate)
            self._session = None
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with tempfile.TemporaryFile() as content:
            mode = await asyncio.to_thread(_read_file, Path(source_path), content)
            await self._copy(_UPLOAD_FILE, str(_inside(target_path)), f"{mode:o}", stdin=content)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with tempfile.TemporaryFile() as archive:
            argv = ["tar", "-C", str(source_dir), "-c", "."]
            await asyncio.to_thread(subprocess.run, argv, stdout=archive, check=True)
            archive.seek(0)
            await self._copy(_UPLOAD_DIR, str(_inside(target_dir)), stdin=archive)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with tempfile.TemporaryFile() as content:
            await self._copy(_DOWNLOAD_FILE, str(_inside(source_path)), stdout=content)
            await asyncio.to_thread(_write_file, content, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with tempfile.TemporaryFile() as archive:
            await self._copy(_DOWNLOAD_DIR, str(_inside(source_dir)), stdout=archive)
            await asyncio.to_thread(_extract, archive, Path(target_dir))

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
        variables = {**self.variables, **(self._merge_env(env) or {})}
        script = 'cd -- "$0" && exec bash -c "$1"'
        return await self._run(["bash", "-c", script, cwd or self._workdir, command], variables, timeout_sec)

    def _open_session(self) -> None:
        """Start process 1 of the sandbox, and keep its namespaces open."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as info:
            argv = [*self._bwrap(), "--info-fd", str(write_end), "--", "bash", "-c", _INIT]
            pipe, env = subprocess.PIPE, {"PATH": _PATH}
            try:
                self._session = subprocess.Popen(
                    argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=env, pass_fds=(write_end,)
                )
            finally:
                os.close(write_end)
            output = self._session.stdout.readline() if self._session.stdout else b""
            if output != _READY:
                raise OSError(f"the sandbox cannot be started: {output.decode(errors='replace').strip()}")
            pid = json.load(info)["child-pid"]
        # Open files, and not the process id: it may be reused, by a process of this machine.
        for name, kind in _NAMESPACES.items():
            self._namespaces[name] = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)

    def _bwrap(self) -> Iterator[str]:
        yield from ("bwrap", *_ISOLATION, "--bind", str(self._root), "/")
        if self._network_disabled:
            yield "--unshare-net"
        for name in (*_SYSTEM, *(f"etc/{name}" for name in _ETC)):
            path = Path("/", name)
            if path.is_symlink() and len(path.parts) == 2:
                yield from ("--symlink", str(path.readlink()), str(path))
            elif path.exists():
                yield from ("--ro-bind", str(path), str(path))
        yield from ("--proc", "/proc", "--dev", "/dev")

    def _enter(self) -> Iterator[str]:
        """The beginning of a command that runs in the sandbox, without privileges."""
        options = (f"--{name}=/proc/{os.getpid()}/fd/{file}" for name, file in self._namespaces.items())
        yield from ("nsenter", "--preserve-credentials", *options, "--", "setpriv", "--no-new-privs")
        if os.getuid() == 0:  # others lose their privileges by themselves
            yield from ("--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")
        yield "--"

    async def _run(
        self,
        argv: list[str],
        env: dict[str, str],
        timeout_s: float | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox. What it leaves running continues after it."""
        outputs = [await _Output.open(), await _Output.open()]
        first, second = (output.write_end for output in outputs)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._enter(),
                *argv,
                stdin=stdin,
                stdout=stdout or first,
                stderr=second,
                env=env,
                start_new_session=True,
            )
            for output in outputs:
                output.write_end.close()
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                raise
            await asyncio.wait([output.reader for output in outputs], timeout=_GRACE_S)
        finally:
            for output in outputs:
                output.close()
        texts = [output.content.decode(errors="replace") for output in outputs]
        return ExecResult(stdout=texts[0], stderr=texts[1], return_code=process.returncode or 0)

    async def _copy(
        self, script: str, *words: str, stdin: IO[bytes] | int = subprocess.DEVNULL, stdout: IO[bytes] | None = None
    ) -> None:
        argv = ["bash", "-o", "pipefail", "-c", script, "copy", *words]
        result = await self._run(argv, {"PATH": _PATH}, stdin=stdin, stdout=stdout)
        if result.return_code:
            raise OSError(f"{' '.join(words)} cannot be copied: {result.stderr.strip()}")

    @property
    def _workdir(self) -> str:
        return str(self.task_env_config.workdir or _WORKDIR)


def _inside(path: str) -> PurePosixPath:
    inside = PurePosixPath("/") / path
    if ".." in inside.parts or len(inside.parts) == 1:
        raise ValueError(f"{path!r} is not a path inside the sandbox")
    return inside


def _read_file(path: Path, content: IO[bytes]) -> int:
    """Copy a file; returns its permissions."""
    with path.open("rb") as source:
        shutil.copyfileobj(source, content)
        content.seek(0)
        return stat.S_IMODE(os.fstat(source.fileno()).st_mode)


def _write_file(content: IO[bytes], path: Path) -> None:
    content.seek(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        shutil.copyfileobj(content, target)


def _extract(archive: IO[bytes], directory: Path) -> None:
    """Extract regular files, and nothing else: a process in the sandbox may have changed the archive."""
    archive.seek(0)
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive) as members:
        members.extractall(  # noqa: S202  filtered
            directory, filter=lambda member, path: tarfile.data_filter(member, path) if member.isfile() else None
        )


class _Output:
    """A stream of a command's output: a pipe that is read to its end, of which the beginning is kept."""

    def __init__(self, write_end: IO[bytes], stream: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.write_end, self.content, self._transport = write_end, bytearray(), transport
        self.reader = asyncio.ensure_future(self._read(stream))

    @classmethod
    async def open(cls) -> "_Output":
        """An empty one. Not a pipe of asyncio's: a process that the command leaves running may keep it open."""
        read_end, write_end = os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
        )
        return cls(os.fdopen(write_end, "wb"), stream, transport)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            self.content += part[: max(0, _MAX_OUTPUT - len(self.content))]

    def close(self) -> None:
        """Stop reading."""
        self.write_end.close()
        self.reader.cancel()
        self._transport.close()
