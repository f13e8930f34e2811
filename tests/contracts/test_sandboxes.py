"""Contracts of sandboxes: A07."""

import asyncio
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.execution.sandbox import Bounds, sandbox_of
from loopwright.execution.sandbox.cgroup import Cgroup
from loopwright.execution.sandbox.docker import Docker
from loopwright.execution.sandbox.seccomp import ABSENT, DENIED
from loopwright.testing.sandboxes import SandboxHarness

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

# Runs in a network namespace of its own, which has a listener that nothing else has.
ELSEWHERE = """
import fcntl, socket, struct, sys
from pathlib import Path
from loopwright.execution.sandbox import Bounds, sandbox_of
from loopwright.execution.sandbox.cgroup import Cgroup
from loopwright.testing.sandboxes import SandboxHarness

address = "127.7.7.7"
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
    fcntl.ioctl(plain, 0x8914, struct.pack("16sh14x", b"lo", 0x49))
listener = socket.create_server((address, 0))
port = listener.getsockname()[1]
socket.create_connection((address, port)).close()
harness = SandboxHarness(Path(sys.argv[1]), sandbox_of("bwrap"))
script = '''
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
    print("reached")
except OSError as error:
    print(error.strerror)
'''
print("outside: reached, inside:", harness.output_of(harness.python(script, address, str(port))))
"""


@pytest.fixture(params=["bwrap", pytest.param("docker", marks=pytest.mark.slow)])
def harness(request, tmp_path):
    if request.param == "docker":
        request.getfixturevalue("docker_daemon")
        readable = (Path(sys.prefix), Path(sys.base_prefix))
        return SandboxHarness(tmp_path, sandbox_of("docker", readable=readable))
    return SandboxHarness(tmp_path, sandbox_of("bwrap"))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="unknown architecture")
def test_a07_every_call_of_the_filter_fails(harness):
    """Given arguments that would otherwise be looked at, each call is refused before that."""
    calls = {**DENIED, **ABSENT}
    numbers = [number for each in calls.values() if (number := getattr(each, platform.machine())) is not None]
    script = """
    import ctypes, sys
    libc = ctypes.CDLL(None, use_errno=True)
    for number in map(int, sys.argv[1:]):
        libc.syscall(number, -1, -1, -1, -1, -1, -1)
        print(ctypes.get_errno())
    """
    errors = {*harness.output_of(harness.python(script, *map(str, numbers))).split()}
    # Docker's libseccomp ignores calls that are newer than itself; they need privileges that are dropped.
    too_new = {"22"} if isinstance(harness.sandbox, Docker) else set()
    assert errors - too_new == {"1", "38"}


def test_a07_a_namespace_beside_the_sandbox_is_out_of_reach(tmp_path):
    """Given a listener in the network namespace where the sandbox was opened, commands do not reach it."""
    argv = ["unshare", "--user", "--map-root-user", "--net", "--", sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "outside: reached, inside: Connection refused", done.stderr


def test_a07_shared_memory_and_open_files_of_the_host_are_not_there(harness):
    libc = ctypes.CDLL(None)
    key = os.getpid()
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    script = """
    import ctypes, os, sys
    files = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
    print(ctypes.CDLL(None).shmget(int(sys.argv[1]), 0, 0), files)
    """
    try:
        assert harness.output_of(harness.python(script, str(key))) == "-1 [0, 1, 2]\n"
    finally:
        libc.shmctl(segment, 0, None)


def test_a07_a_process_outside_cannot_be_traced(harness):
    """By its number there is no such process."""
    script = """
    import ctypes, sys
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.ptrace(16, int(sys.argv[1]), 0, 0), ctypes.get_errno())  # PTRACE_ATTACH
    """
    assert harness.output_of(harness.python(script, str(os.getpid()))) == "-1 3\n"


def test_a07_a_process_cannot_protect_itself_from_being_ended_when_memory_runs_out(harness):
    script = """
    from pathlib import Path
    score = Path("/proc/self/oom_score_adj")
    print(int(score.read_text()))
    try:
        score.write_text("-1000")
        print("protected")
    except OSError:
        print("refused")
    """
    assert harness.output_of(harness.python(script)).split()[1] == "refused"


def test_a07_the_kernels_own_tables_are_not_readable(tmp_path):
    """Files of /proc that only root may read stay hidden, although root inside owns them like root outside."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap"))
    script = """
    import os
    for name in sorted(os.listdir("/proc")):
        path = f"/proc/{name}"
        if os.path.isfile(path) and not os.stat(path).st_mode & 0o044:
            try:
                with open(path, "rb", buffering=0) as file:
                    print(path, len(os.read(file.fileno(), 64)))
            except OSError:
                pass
    """
    readable = [line for line in harness.output_of(harness.python(script)).splitlines() if not line.endswith(" 0")]
    assert readable == []


@pytest.fixture
def memory_group():
    """Skips the test where no control group limits memory."""
    group = Cgroup.create(f"loopwright-probe-{os.getpid()}", {"memory": 1 << 30})
    asyncio.run(group.close())
    if not group.limits("memory"):
        pytest.skip("no control group for memory")


def test_a07_the_kernel_enforces_the_memory_limit(tmp_path, memory_group):
    """Given memory that belongs to no process, which no measurement of processes finds, it is counted as well."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(memory_bytes=128 << 20)))
    script = """
    import os, time
    files = [os.memfd_create("x") for _ in range(4)]
    for file in files:
        for _ in range(64):
            os.write(file, bytes(1 << 20))
    print("more than the limit")
    """
    [done] = harness.run_all(harness.python(script))
    assert harness.stdout == ""
    assert done.signal == signal.SIGKILL
    assert harness.exceeded_limit == f"memory: all of {128 << 20} bytes"


def test_a07_memory_that_processes_share_counts_once(tmp_path, memory_group):
    """Given four processes that share 80 of 200 MiB, none is ended."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(memory_bytes=200 << 20)))
    script = """
    import os, time
    data = b"x" * (80 << 20)
    children = [os.fork() or (time.sleep(1), os._exit(0)) for _ in range(3)]
    for child in children:
        os.waitpid(child, 0)
    print("done")
    """
    assert harness.output_of(harness.python(script)) == "done\n"
    assert harness.exceeded_limit is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may inspect mapped files")
def test_a07_a_mapped_file_without_a_name_counts_against_the_disk_bound(tmp_path):
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap", Bounds(disk_bytes=8 << 20)))
    script = """
    import mmap, os, time
    maps = []
    for number in range(24):
        with open("hidden", "wb+") as file:
            os.unlink("hidden")
            file.write(bytes(1 << 20))
            file.flush()
            maps.append(mmap.mmap(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY), 4096, prot=mmap.PROT_READ))
    os.closerange(3, 1000)
    time.sleep(50)
    """
    [done] = harness.run_all(harness.python(script))
    assert (done.signal, harness.exceeded_limit[:5]) == (signal.SIGKILL, "disk:")
