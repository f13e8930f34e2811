"""The launcher of bubblewrap: control groups, a session keyring of its own, and the filter as an open file."""

import ctypes
import platform
import subprocess
import sys

import pytest

from loopwright.execution.sandbox import launcher_main

KEYCTL = {"x86_64": 250, "aarch64": 219}.get(platform.machine())
SHOW = f"""
import ctypes, os, sys
print(ctypes.CDLL(None).syscall({KEYCTL}, 0, -3, 0))
print(os.read(5, 99), sys.argv[1:])
"""


@pytest.mark.skipif(KEYCTL is None, reason="unknown architecture")
def test_the_program_starts_in_another_keyring_with_its_groups_and_the_filter(tmp_path):
    ours = ctypes.CDLL(None).syscall(KEYCTL, 0, -3, 1)
    (tmp_path / "filter").write_bytes(b"program")
    groups = [tmp_path / "pids", tmp_path / "memory"]
    for group in groups:
        group.touch()
    launcher = [sys.executable, "-IS", launcher_main.__file__, tmp_path / "filter", "\n".join(map(str, groups))]
    argv = [*launcher, sys.executable, "-c", SHOW, "--args", "3"]
    keyring, arguments = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(keyring) > 0
    assert int(keyring) != ours
    assert arguments == "b'program' ['--args', '3']"
    assert [group.read_text() for group in groups] == ["0", "0"]
