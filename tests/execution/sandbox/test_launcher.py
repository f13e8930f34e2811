"""The launcher of bubblewrap: a session keyring of its own, and the filter as an open file."""

import ctypes
import platform
import subprocess
import sys

import pytest
from tests.execution.sandbox.fake_docker import write_script

from loopwright.execution.sandbox import launcher_main

KEYCTL = {"x86_64": 250, "aarch64": 219}.get(platform.machine())
SHOW = f"""
import ctypes, os, sys
print(ctypes.CDLL(None).syscall({KEYCTL}, 0, -3, 0))
print(sys.argv[1], os.read(int(sys.argv[2]), 99), sys.argv[3:])
"""


@pytest.mark.skipif(KEYCTL is None, reason="unknown architecture")
def test_the_program_starts_in_another_keyring_with_the_filter(tmp_path):
    ours = ctypes.CDLL(None).syscall(KEYCTL, 0, -3, 1)
    (tmp_path / "filter").write_bytes(b"program")
    (tmp_path / "show.py").write_text(SHOW)
    write_script(tmp_path / "bwrap", f'exec {sys.executable} {tmp_path}/show.py "$@"')
    argv = [sys.executable, "-IS", launcher_main.__file__, tmp_path / "filter", tmp_path / "bwrap", "--args", "3"]
    keyring, arguments = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(keyring) > 0
    assert int(keyring) != ours
    assert arguments == "--seccomp b'program' ['--args', '3']"
