"""Runs a verb in a process of its own that need not import the package: it is forked from one that has done so.

For tests of what verbs print and return. Tests of processes as such (signals, kills, terminals) start real ones.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_TIMEOUT_S = 300.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["pytest", *(f"loopwright.cli.{verb}" for verb in ("run", "verify", "check", "export", "episodes", "compare"))]
)


def run_verb(directory: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `loopwright` with these words and environment variables in a directory; its exit code and its output."""
    with TemporaryDirectory() as scratch:
        files = [Path(scratch, name) for name in ("stdout", "stderr")]
        arguments = [str(word) for word in words]
        process = _processes.Process(target=_main, args=(arguments, directory, {**os.environ, **variables}, files))
        process.start()
        process.join(_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, _TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))


def _main(arguments: list[str], directory: Path, environment: dict[str, str], files: list[Path]) -> None:
    from loopwright.cli import main

    for descriptor, file in enumerate((Path(os.devnull), *files)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    # As a new process has them: multiprocessing replaces the input.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["loopwright", *arguments]
    sys.path.insert(0, str(directory))
    main()
