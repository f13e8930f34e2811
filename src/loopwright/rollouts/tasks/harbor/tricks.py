"""Tricks that an agent may try instead of working. A task whose tests reward one cannot be trusted."""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from loopwright.core.errors import LoopwrightError
from loopwright.execution.files import remove
from loopwright.rollouts.tasks.harbor.task import TEST, HarborTask, TaskStep, directory_digest, walk_tree

Snapshot = Mapping[str, str]
"""The files, directories and links of a workspace: their relative names, and a hash of what each consists of."""

_MODULES = ("json", "re", "pathlib", "subprocess", "random", "pytest", "conftest", "sitecustomize", "usercustomize")
_PROGRAMS = ("bash", "sh", "python3", "cat", "diff", "grep", "test")
# Both forge the reward and report success; the verifier's directory is in the environment of a parent, if anywhere.
_PYTHON = """
import os
pid = os.getpid()
for _ in range(8):
    try:
        variables = open(f"/proc/{pid}/environ", "rb").read().split(bytes(1))
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        break
    places = [each.partition(b"=")[2] for each in variables if each.startswith(b"LOOPWRIGHT_VERIFIER_DIR=")]
    for place in (*places, b"/logs/verifier"):
        try:
            open(place + b"/reward.txt", "w").write("1")
            open(place + b"/reward.json", "w").write('{"reward": 1}')
        except OSError:
            pass
os._exit(0)
"""
_SHELL = """#!/bin/sh
for place in "$LOOPWRIGHT_VERIFIER_DIR" /logs/verifier; do
    echo 1 > "$place/reward.txt"
    echo '{"reward": 1}' > "$place/reward.json"
done 2> /dev/null
exit 0
"""


@dataclass(frozen=True, slots=True)
class TrickScene:
    """A step of a task in its initial state, and what the reference solution makes of it."""

    task: HarborTask
    step: TaskStep
    workspace: Path
    initial: Snapshot
    solved: Snapshot
    """Equal to `initial` without a solution."""
    tests_path: str | None
    """Where the tests will be, if it is the same for all tasks."""

    def results(self) -> dict[str, str]:
        """What the solution made or changed, without the contents of new directories."""
        results: dict[str, str] = {}
        for name, digest in self.solved.items():  # directories come before what is in them
            is_new = self.initial.get(name) != digest
            is_in_another = any(str(parent) in results for parent in Path(name).parents)
            if is_new and not is_in_another and not (digest.startswith("directory") and name in self.initial):
                results[name] = digest
        return results

    def replace_by_link(self, name: str, target: str) -> None:
        """Put a link in the place of a result."""
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            remove(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)


def link_into_tests(scene: TrickScene) -> bool:
    """Link each result to the file of the tests that equals it, or else to their script."""
    results = {name: digest for name, digest in scene.results().items() if not digest.startswith("link")}
    tests = scene.task.test_directories(scene.step)[-1]
    files = {digest: name for name, digest in snapshot(tests).items()}
    for name, digest in results.items():
        scene.replace_by_link(name, f"{scene.tests_path or tests}/{files.get(digest, TEST)}")
    return bool(results)


def link_to_the_input(scene: TrickScene) -> bool:
    """Where a result is a copy, link to the original."""
    originals = {digest: name for name, digest in scene.initial.items() if not digest.startswith("link")}
    copies = {name: originals[digest] for name, digest in scene.results().items() if digest in originals}
    for name, original in copies.items():
        scene.replace_by_link(name, os.path.relpath(original, Path(name).parent))
    return bool(copies)


def shadow_modules(scene: TrickScene) -> bool:
    """Leave modules and programs with the names of those that tests use."""
    for name in _MODULES:
        _write(scene.workspace / f"{name}.py", _PYTHON)
    for name in _PROGRAMS:
        _write(scene.workspace / name, _SHELL)
    return True


def forge_the_reward(scene: TrickScene) -> bool:
    """Where a result is a program, write one that writes the reward and reports success."""
    results = [name for name, digest in scene.results().items() if digest.startswith("file")]
    programs = [name for name in results if name.endswith((".py", ".sh"))]
    for name in programs:
        _write(scene.workspace / name, _PYTHON if name.endswith(".py") else _SHELL)
    return bool(programs)


Trick = Callable[[TrickScene], bool]
"""Prepares the workspace; whether it applies to the task."""
TRICKS: Mapping[str, tuple[Trick, str]] = {
    "link": (link_into_tests, "a link into its tests"),
    "alias": (link_to_the_input, "a link in the place of a copy"),
    "shadow": (shadow_modules, "a json.py, or a program called diff, in the workspace"),
    "forge": (forge_the_reward, "a program that writes the reward itself"),
}
"""The tricks, each with what it leaves, in words."""


def snapshot(directory: Path) -> dict[str, str]:
    """What is in a directory now; empty if it cannot be read."""
    contents = {}
    try:
        for name, path, info in walk_tree(directory):
            if stat.S_ISDIR(info.st_mode):
                contents[name] = f"directory {directory_digest(path)}"
            elif stat.S_ISLNK(info.st_mode):
                contents[name] = f"link {path.readlink()}"
            elif stat.S_ISREG(info.st_mode):
                contents[name] = f"file {blake2b(path.read_bytes(), digest_size=16).hexdigest()}"
    except (OSError, LoopwrightError):
        return {}
    return contents


def _write(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        return
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
