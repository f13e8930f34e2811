"""The local executor: the contract of all executors, and hostile commands."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.children import children

from loopwright.core.errors import LaunchError, StorageError
from loopwright.execution.base import Completion, Executor
from loopwright.execution.local.executor import TAIL_BYTES, CappedFile, LocalExecutor, core_sets
from loopwright.execution.local.process_tree import PidSnapshot, new_pids
from loopwright.execution.local.processes import end_leftovers
from loopwright.testing.executors import ExecutorContract, alive, command, ignore, written_pid

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon", "w").write(f"{os.getpid()}\\n")
        time.sleep(100)
    os._exit(0)
while not os.path.exists("daemon"):
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))
"""


def run(executor: LocalExecutor, *commands) -> list[Completion]:
    async def main() -> list[Completion]:
        try:
            return await asyncio.gather(*(executor.run(each, ignore) for each in commands))
        finally:
            await executor.close()

    return asyncio.run(main())


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class TestLocalExecutor(ExecutorContract):
    def make_executor(self, parallel: int = 2, output_bytes: int = 1 << 20) -> Executor:
        return LocalExecutor(parallel, output_bytes=output_bytes, grace_s=0.5)


@pytest.mark.parametrize(
    ("argv", "exit_code"), [(("true",), 0), (("sh", "-c", "exit 3"), 3), (("sh", "-c", "kill -9 $$"), 128 + 9)]
)
def test_the_memory_of_a_small_program_is_exact_on_request(tmp_path, argv, exit_code):
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    new_pids(PidSnapshot(0, 0, 0.0))  # it keeps a file of /proc open from its first use on
    before = open_fds()
    [done] = run(LocalExecutor(), replace(command(tmp_path, ""), argv=argv, measures_memory=True))

    assert done.exit_code == exit_code
    assert 100_000 < done.usage["max_rss_bytes"] < min(own, 8_000_000)
    assert done.usage["wall_s"] > 0
    assert open_fds() == before


def test_a_measured_command_keeps_its_output_its_stdin_and_its_deadline(tmp_path):
    before = children()
    for name in ("read", "slow"):
        (tmp_path / name).mkdir()
    read = replace(command(tmp_path / "read", "cat; echo end"), measures_memory=True)
    slow = replace(command(tmp_path / "slow", "sleep 60 & sleep 60"), measures_memory=True, timeout_s=0.5)
    done, late = run(LocalExecutor(2), read, slow)

    assert (done.exit_code, (tmp_path / "read" / "stdout").read_text()) == (0, "end\n")
    assert late.timed_out
    assert "max_rss_bytes" not in late.usage
    assert children() <= before


def test_a_measured_program_that_is_missing_is_named(tmp_path):
    with pytest.raises(LaunchError, match="not found"):
        run(LocalExecutor(), replace(command(tmp_path, ""), argv=("no-such-program",), measures_memory=True))


def test_a_gigabyte_of_output_uses_no_memory(tmp_path):
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [done] = run(LocalExecutor(output_bytes=1 << 20), command(tmp_path, "head -c 1000000000 /dev/zero; echo last"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert done.exit_code == 0
    assert done.stdout_bytes == 1_000_000_005
    assert (tmp_path / "stdout").stat().st_size < 2 << 20
    assert (tmp_path / "stdout").read_bytes().endswith(b"last\n")
    assert grown_kib < 16 * 1024


def test_heavy_output_does_not_starve_another_command(tmp_path):
    flood, calm = tmp_path / "flood", tmp_path / "calm"
    flood.mkdir()
    calm.mkdir()
    # The flood ends only when the neighbour has, so this ends only if both are served.
    done = run(
        LocalExecutor(2, output_bytes=1000),
        command(flood, "while [ ! -e ../calm/over ]; do head -c 1000000 /dev/zero; done"),
        command(calm, "for i in 1 2 3 4 5; do echo $i; sleep 0.02; done; echo > over"),
    )
    assert [each.exit_code for each in done] == [0, 0]
    assert done[1].stdout_bytes == 10


@pytest.mark.parametrize(("stay_s", "timeout_s"), [("100", 1.0), ("0", 60.0)], ids=["timeout", "success"])
def test_a_double_forked_daemon_is_ended(tmp_path, stay_s, timeout_s):
    argv = (sys.executable, "-S", "-c", DAEMON, stay_s)
    [done] = run(LocalExecutor(grace_s=0.2), replace(command(tmp_path, "", timeout_s=timeout_s), argv=argv))
    assert done.timed_out is (timeout_s < 60)
    assert not alive(written_pid(tmp_path / "daemon"))


def test_the_end_of_a_trial_does_not_affect_the_daemons_of_another(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = replace(command(one, "(setsid sleep 0.3 &); echo > ../up; sleep 0.2"), marker=f"trial-{os.getpid()}.1")
    second = replace(
        command(two, "(setsid sh -c 'sleep 0.5; echo > lived' &); while [ ! -e lived ]; do sleep 0.02; done"),
        marker=f"trial-{os.getpid()}.12",
    )
    assert [done.exit_code for done in run(LocalExecutor(2), first, second)] == [0, 0]
    assert (two / "lived").exists()


def test_a_full_disk_ends_the_trial_with_a_storage_error(small_disk, tmp_path):
    script = f"echo $$ > {tmp_path}/pid; while :; do head -c 100000 /dev/zero; done"
    with pytest.raises(StorageError, match="the disk is full"):
        run(LocalExecutor(), command(small_disk, script))
    assert not alive(written_pid(tmp_path / "pid"))


KILLED = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from loopwright.execution.local.executor import LocalExecutor
from loopwright.testing.executors import command

directory = Path(sys.argv[1])
script = "(setsid sh -c 'echo $$ > daemon; exec sleep 100' &); sleep 100"
record = (directory / "record").write_text
asyncio.run(LocalExecutor().run(replace(command(directory, script), marker=f"{sys.argv[2]}:1"), record))
"""


def test_s13_leftovers_of_a_killed_loopwright_are_ended(tmp_path):
    marker = f"killed-run-{os.getpid()}"
    parent = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, marker])
    daemon = written_pid(tmp_path / "daemon")
    while not (tmp_path / "record").exists() or not (handle := (tmp_path / "record").read_text()):
        time.sleep(0.01)  # on a busy machine the daemon is faster
    parent.kill()
    parent.wait()
    pid = int(handle.partition(":")[0])
    assert alive(pid)
    assert end_leftovers([handle], marker) >= 2
    assert not alive(pid)
    assert not alive(daemon)


def test_nothing_starts_if_its_output_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="stdout"):
        run(LocalExecutor(), replace(command(tmp_path, "echo > ran"), stdout=tmp_path / "file" / "stdout"))
    assert not (tmp_path / "ran").exists()


def test_nothing_leaks_over_many_runs(tmp_path):
    def batch() -> None:
        executor = LocalExecutor(2, grace_s=0.1)
        good = [command(tmp_path, "true") for _ in range(50)]
        assert {done.exit_code for done in run(executor, *good)} == {0}
        with pytest.raises(LaunchError):
            run(executor, replace(command(tmp_path, ""), argv=("no-such-program",)))
        assert run(executor, command(tmp_path, "sleep 100", timeout_s=0.05))[0].timed_out

    batch()
    before = open_fds(), children()
    for _ in range(4):
        batch()
    assert open_fds() <= before[0]  # files left open by other tests may be closed meanwhile
    assert children() == before[1]


def test_an_executor_outlives_an_event_loop(tmp_path):
    executor = LocalExecutor(1)
    for _ in range(2):
        done = run(executor, command(tmp_path, "true"), command(tmp_path, "true"))
        assert [each.exit_code for each in done] == [0, 0]


def test_pinned_trials_have_separate_cores(tmp_path):
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    ours = os.sched_getaffinity(0)
    run(
        LocalExecutor(2, pin_cpus=True),
        *(command(directory, "grep Cpus_allowed_list /proc/self/status; sleep 0.3") for directory in directories),
    )
    lists = [(directory / "stdout").read_text().split()[1] for directory in directories]
    assert len(set(lists)) == min(2, len(ours))
    assert os.sched_getaffinity(0) == ours


def test_a_memory_limit_stops_a_greedy_command(tmp_path):
    argv = (sys.executable, "-S", "-c", "import time; time.sleep(0.3); bytearray(400 << 20)")
    [done] = run(LocalExecutor(memory_bytes=200 << 20), replace(command(tmp_path, ""), argv=argv))
    assert done.exit_code == 1
    assert "MemoryError" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "empty"),
        (("sh", "-c", "a\0b"), "null byte"),
        (("./text",), "neither a program"),
        (("sh", "-c", "x" * 3_000_000), "too long"),
        (("./missing",), "not found"),
    ],
)
def test_launch_errors_are_explained(tmp_path, argv, message):
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(LaunchError, match=message):
        run(LocalExecutor(), replace(command(tmp_path, ""), argv=argv))


def test_running_out_of_file_descriptors_is_an_infrastructure_fault(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def attempt(spare: int) -> int | bool | None:
        fds = []
        try:
            while open_fds() < limit - spare:
                fds.append(os.open(os.devnull, os.O_RDONLY))
            done = await LocalExecutor().run(command(tmp_path, "true"), ignore)
            return done.exit_code
        except LaunchError as error:
            return error.infra
        finally:
            for fd in fds:
                os.close(fd)

    run(LocalExecutor(), command(tmp_path, "true"))
    before = open_fds()
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 64  # noqa: PTH208  other tests may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        # Each of the files, pipes and pidfds in turn is the first that cannot be opened.
        results = [asyncio.run(attempt(spare)) for spare in range(16)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(map(repr, results)) == {"True", "0"}
    assert open_fds() == before


def test_a_loopwright_inside_a_trial_keeps_the_outer_marker(tmp_path):
    base = command(tmp_path, 'echo "$LOOPWRIGHT_TRIAL"')
    run(LocalExecutor(), replace(base, environment={**base.environment, "LOOPWRIGHT_TRIAL": ":outer"}, marker="in"))
    assert (tmp_path / "stdout").read_text() == ":outer:in\n"


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]),
        ([0, 2, 5], 2, [{0}, {2}]),
        ([4], 2, [{4}, {4}]),
    ],
)
def test_core_sets_are_equal_and_disjoint_if_possible(cores, count, expected):
    assert core_sets(cores, count) == expected


@given(
    limit_bytes=st.integers(0, 300_000),
    sizes=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 100_000)), max_size=8),
)
def test_beginning_and_end_are_written_and_the_rest_is_counted(tmp_path_factory, limit_bytes, sizes):
    path = tmp_path_factory.mktemp("output") / "stdout"
    chunks = [bytes([index]) * size for index, size in enumerate(sizes)]
    data = b"".join(chunks)
    omitted = max(0, len(data) - limit_bytes - TAIL_BYTES)
    if omitted:
        marker = b"\n[loopwright: %d bytes left out]\n" % omitted
        expected = data[:limit_bytes] + marker + data[-TAIL_BYTES:]
    else:
        expected = data
    file = CappedFile(str(path), limit_bytes)
    file.open()
    for chunk in chunks:
        file.write(chunk)
    file.finish()
    assert (file.produced_bytes, path.read_bytes()) == (len(data), expected)
