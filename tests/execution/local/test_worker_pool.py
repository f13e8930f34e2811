"""Python workers: values, errors, timeouts and deaths of workers, output, and leftovers."""

import asyncio
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.children import children

from loopwright.core.errors import StorageError
from loopwright.execution.base import CallResult, FunctionCall
from loopwright.execution.local.worker_pool import WorkerPool
from loopwright.testing.executors import alive, appears, ignore, written_pid

MODULE = """
import asyncio, os, subprocess, sys, time

def square(x): return {"y": x * x}
def pid(): return {"pid": os.getpid()}
def say(text, error=""): print(text); print(error, end="", file=sys.stderr); return {}
def fail(): raise ValueError("no such luck")
def leave(code): sys.exit(code)
def interrupt(): raise KeyboardInterrupt
def vanish(code): print("so long", flush=True); os._exit(code)
def crash(): os.kill(os.getpid(), 11)
def hang(): open("pid", "w").write(f"{os.getpid()}\\n"); time.sleep(100)
def stubborn():
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(0.1)
def give(kind):
    if kind == "numpy":
        import numpy
        return {"a": numpy.float32(1.5), "b": numpy.int64(3), "c": numpy.float64("nan")}
    return {
        "list": [1], "none": None, "text": {"y": "1"}, "function": {"y": square}, "key": {1: 2},
        "huge": {str(i): 1.0 for i in range(200_000)}, "infinite": {"y": float("-inf"), "z": 1}, "big": {"y": 2**80},
        "bool": {"y": True}, "complex": {"y": 1j}, "long": "x" * 10_000_000,
    }[kind]
def fork():
    os.fork()
    return {"pid": os.getpid()}
def fork_and_stay():
    if os.fork() == 0:
        time.sleep(100)
    return {"pid": os.getpid()}
def daemon():
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    child.returncode = 0
    return {"pid": child.pid}
def where(): return {"inside": float(os.path.samefile(".", os.environ["PLACE"]) and os.path.exists("parameters.json"))}
def look(): return {"number": int(os.path.basename(os.getcwd())), "size": os.path.getsize("parameters.json")}
def write(file): open(file, "w").close(); return {}
def cover(): os.chdir("/"); return {}
def annotate(): open("parameters.json", "r+").write("#"); return {}
def link(): os.link("parameters.json", "../linked"); return {}
def environment(): return {"threads": float(os.environ["THREADS"])}
def flood(count):
    for _ in range(count): sys.stdout.write("x" * 1_000_000)
    print("last"); return {}
def close_output(): sys.stdout.close(); return {}
def redirect_output(): os.dup2(os.open(os.devnull, os.O_WRONLY), 1); return {}
def greedy(): return {"y": len(bytearray(400 << 20))}
def thread():
    import threading
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    return {"pid": os.getpid()}
async def later(x): await asyncio.sleep(0); return {"y": x}
class Tool:
    @staticmethod
    def use(**anything): return {"n": len(anything)}
number = 3
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "tasks.py").write_text(MODULE)
    (folder / "dies.py").write_text("import os; os._exit(4)")
    (folder / "broken.py").write_text("import no_such_module_at_all")
    (folder / "slow.py").write_text("import time; time.sleep(100)")
    (folder / "late.py").write_text("import time; time.sleep(0.6)\ndef f(): return {'y': 1}")
    return folder


@pytest.fixture
def make(code, tmp_path):
    def make(
        name: str, number: int = 1, *, timeout_s: float | None = 60.0, environment=None, **arguments
    ) -> FunctionCall:
        directory = tmp_path / "trials" / str(number)
        return FunctionCall(
            function=name if ":" in name else f"tasks:{name}",
            path=(code,),
            arguments=arguments,
            environment={"PATH": os.environ["PATH"], "PLACE": str(directory), **(environment or {})},
            directory=directory,
            parameters=b'{"x": 1}',
            timeout_s=timeout_s,
            marker=f"worker-test-{os.getpid()}-{number}",
        )

    return make


def use(body, **options):
    async def main():
        pool = WorkerPool(**{"size": 2, "grace_s": 0.3, **options})
        try:
            return await asyncio.wait_for(body(pool), 60)
        finally:
            await pool.close()

    return asyncio.run(main())


def run(*calls: FunctionCall, **options) -> list[CallResult]:
    """The results of calls, one after another."""

    async def body(pool):
        return [await pool.call(call, ignore) for call in calls]

    return use(body, **options)


def test_a_value_is_returned(make):
    call = make("square", x=7)
    [result] = run(call)
    assert result.value == {"y": 49}
    assert (result.error, result.timed_out, result.worker_exit) == (None, False, None)


@pytest.mark.parametrize(
    ("name", "arguments", "files"),
    [
        ("square", {"x": 7}, None),
        ("say", {"text": "printed"}, ["parameters.json", "stdout"]),
        ("fail", {}, ["parameters.json", "stderr"]),
        ("write", {"file": "model"}, ["model", "parameters.json"]),
        ("cover", {}, ["parameters.json"]),
        ("annotate", {}, ["parameters.json"]),
        ("link", {}, ["parameters.json"]),
        ("thread", {}, ["parameters.json"]),
    ],
)
def test_a_directory_without_anything_to_keep_becomes_that_of_the_next_call(make, name, arguments, files):
    """Given its own directory during each call, only one that left something, or a thread that may, keeps it."""
    calls = [make(name, 1, environment={"PLACE": ""}, **arguments)]
    calls += [make("look", number, environment={"PLACE": ""}) for number in (2, 3)]
    calls[2] = replace(calls[2], parameters=b"{}")
    _, *looks = run(*calls, size=1)
    assert [look.value for look in looks] == [{"number": 2, "size": 8}, {"number": 3, "size": 2}]
    first = calls[0].directory
    assert (sorted(path.name for path in first.iterdir()) if first.exists() else None) == files
    if files:
        expected = b'#"x": 1}' if name == "annotate" else b'{"x": 1}'
        assert (first / "parameters.json").read_bytes() == expected
    assert [call.directory.exists() for call in calls[1:]] == [name == "thread"] * 2


def test_a_directory_that_was_renamed_or_deleted_meanwhile_is_left_alone(make):
    """Given a parent that moves the first directory and deletes the second, each call has one of its own."""
    calls = [make("look", number, environment={"PLACE": ""}) for number in (1, 2, 3)]

    async def body(pool):
        await pool.call(calls[0], ignore)
        calls[0].directory.rename(calls[0].directory.with_name("1.attempt-1"))
        await pool.call(calls[1], ignore)
        shutil.rmtree(calls[1].directory)
        return await pool.call(calls[2], ignore)

    assert use(body, size=1).value == {"number": 3, "size": 8}
    assert [path.name for path in calls[0].directory.parent.iterdir()] == ["1.attempt-1"]


def test_a_worker_is_reused(make):
    first, second = run(*(make("pid", number, environment={"PLACE": ""}) for number in (1, 2)), size=1)
    assert first.value == second.value


def test_another_environment_means_another_worker(make):
    results = run(
        *(make("environment", n, environment={"PLACE": "", "THREADS": f"{n % 2}"}) for n in range(1, 5)), size=1
    )
    assert [each.value for each in results] == [{"threads": float(n % 2)} for n in range(1, 5)]


def test_on_start_gets_the_worker(make):
    starts = []

    async def body(pool):
        return await pool.call(make("pid"), starts.append)

    assert use(body).value == {"pid": int(starts[0].partition(":")[0])}
    assert int(starts[0].partition(":")[2]) > 0


def test_an_on_start_that_raises_ends_the_worker(make):
    def refuse(handle):
        refuse.pid = int(handle.partition(":")[0])
        raise OSError("the ledger is gone")

    async def body(pool):
        with pytest.raises(OSError, match="ledger"):
            await pool.call(make("square", x=1), refuse)
        assert not alive(refuse.pid)
        return await pool.call(make("square", x=2), ignore)

    assert use(body).value == {"y": 4}


def test_the_call_runs_in_the_trials_directory(make):
    assert run(make("where"))[0].value == {"inside": 1.0}


def test_output_belongs_to_its_trial(make):
    calls = [
        make("say", number, environment={"PLACE": ""}, text=f"out {number}", error=f"err {number}")
        for number in range(5)
    ]
    for call, result in zip(calls, run(*calls, size=1), strict=True):
        number = call.directory.name
        assert (call.directory / "stdout").read_text() == f"out {number}\n"
        assert (call.directory / "stderr").read_text() == f"err {number}"
        assert (result.stdout_bytes, result.stderr_bytes) == (6, 5)


def test_heavy_output_is_capped(make):
    call = make("flood", count=100)
    [result] = run(call, output_bytes=1 << 20)
    assert result.stdout_bytes == 100_000_005
    assert (call.directory / "stdout").stat().st_size < 2 << 20
    assert (call.directory / "stdout").read_bytes().endswith(b"xlast\n")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fail", {}, "ValueError: no such luck"),
        ("leave", {"code": 3}, "SystemExit: 3"),
        ("interrupt", {}, "KeyboardInterrupt"),
        ("square", {"z": 3}, "unexpected keyword argument 'z'"),
        ("nothing", {}, "has no 'nothing'"),
        ("number", {}, "not a callable"),
        ("broken:f", {}, "No module named 'no_such_module_at_all'"),
    ],
)
def test_an_exception_is_an_error_with_its_traceback(make, name, arguments, text):
    call, after = (
        make(name, 1, environment={"PLACE": ""}, **arguments),
        make("square", 2, environment={"PLACE": ""}, x=2),
    )
    failed, good = run(call, after, size=1)
    assert failed.value is None
    assert text in failed.error
    assert (call.directory / "stderr").read_text() == failed.error
    assert good.value == {"y": 4}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("list", "[1] (list)"),
        ("none", "None (NoneType)"),
        ("text", "'y' is '1' (str)"),
        ("function", "(function)"),
        ("complex", "(complex)"),
        ("key", "the name 1 (int) is not a string"),
        ("huge", "200000 of them"),
        ("long", "(str)"),
    ],
)
def test_a_return_value_other_than_a_dict_of_numbers_is_an_error(make, kind, text):
    [result] = run(make("give", kind=kind))
    assert result.value is None
    assert text in result.error


def test_numbers_of_all_types_are_returned(make):
    plain, infinite, big, flag = run(
        *(make("give", environment={"PLACE": ""}, kind=kind) for kind in ("numpy", "infinite", "big", "bool")), size=1
    )
    assert (plain.value["a"], plain.value["b"]) == (1.5, 3)
    assert math.isnan(plain.value["c"])
    assert infinite.value == {"y": -math.inf, "z": 1}
    assert big.value == {"y": float(2**80)}
    assert flag.value == {"y": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "worker_exit"),
    [("vanish", {"code": 3}, "exit code 3"), ("crash", {}, "signal 11 (SIGSEGV)"), ("dies:f", {}, "exit code 4")],
)
def test_a_worker_that_dies_is_reported_and_replaced(make, name, arguments, worker_exit):
    call, after = (
        make(name, 1, environment={"PLACE": ""}, **arguments),
        make("square", 2, environment={"PLACE": ""}, x=2),
    )
    dead, good = run(call, after, size=1)
    assert (dead.worker_exit, dead.value, dead.error, dead.timed_out) == (worker_exit, None, None, False)
    assert (call.directory / "stdout").read_text() == ("so long\n" if name == "vanish" else "")
    assert good.value == {"y": 4}


@pytest.mark.parametrize("name", ["hang", "stubborn"])
def test_a_timeout_kills_the_worker(make, name):
    starts = []

    async def body(pool):
        timed_out = await pool.call(make(name, timeout_s=0.3), starts.append)
        return timed_out, await pool.call(make("square", 2, x=2), ignore)

    timed_out, good = use(body, size=1)
    assert (timed_out.timed_out, timed_out.worker_exit, timed_out.value) == (True, None, None)
    assert not alive(int(starts[0].partition(":")[0]))
    assert good.value == {"y": 4}


def test_importing_does_not_count_against_the_timeout(make):
    assert run(make("late:f", timeout_s=0.3))[0].value == {"y": 1}


def test_cancelling_kills_the_worker(make):
    call = make("hang")

    async def body(pool):
        task = asyncio.ensure_future(pool.call(call, ignore))
        await appears(call.directory / "pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(written_pid(call.directory / "pid"))
        return await pool.call(make("square", 2, x=2), ignore)

    assert use(body, size=1).value == {"y": 4}


def test_kill_all_ends_running_calls(make):
    call = make("hang")

    async def body(pool):
        task = asyncio.ensure_future(pool.call(call, ignore))
        await appears(call.directory / "pid")
        pool.kill_all()
        return await task

    assert use(body).worker_exit == "signal 9 (SIGKILL)"


def test_a_callable_that_forks_responds_once(make):
    calls = [make(name, n, environment={"PLACE": ""}) for n, name in enumerate(["pid", "fork", "fork", "pid"])]
    results = run(*calls, size=1)
    assert all(each.value is not None for each in results)


@pytest.mark.parametrize("name", ["fork_and_stay", "daemon"])
def test_processes_left_by_a_callable_are_ended(make, name):
    first, second = run(*(make(each, n, environment={"PLACE": ""}) for n, each in enumerate([name, "pid"])), size=1)
    assert not alive(first.value["pid"])
    assert second.value != first.value


@pytest.mark.parametrize("name", ["close_output", "redirect_output"])
def test_a_callable_that_closes_its_output_does_not_affect_other_calls(make, name):
    after = make("say", 2, environment={"PLACE": ""}, text="printed")
    run(make(name, 1, environment={"PLACE": ""}), after, size=1)
    assert (after.directory / "stdout").read_text() == "printed\n"


def test_async_callables_are_awaited(make):
    assert run(make("later", x=3))[0].value == {"y": 3}


def test_attributes_of_classes_can_be_called(make):
    assert run(make("tasks:Tool.use", a=1, b=2))[0].value == {"n": 2}


def test_arguments_may_be_large(make):
    assert run(make("tasks:Tool.use", text="x" * 5_000_000))[0].value == {"n": 1}


def test_exceeding_the_memory_limit_is_an_error(make):
    assert "MemoryError" in run(make("greedy"), memory_bytes=300 << 20)[0].error


def test_a_directory_that_cannot_be_created_is_a_storage_error(make, tmp_path):
    (tmp_path / "trials").write_text("a file")
    with pytest.raises(StorageError, match="trials"):
        run(make("square", x=1))


def test_a_full_disk_is_a_storage_error(make, small_disk):
    call = replace(make("flood", count=1), directory=small_disk / "1")
    with pytest.raises(StorageError, match="the disk is full"):
        run(call)


def test_a_callable_may_leave_threads(make):
    first, second = run(*(make("thread", n, environment={"PLACE": ""}) for n in (1, 2)), size=1)
    assert first.value == second.value


def test_parallel_calls_do_not_interfere(make):
    async def body(pool):
        calls = [make("square", n, environment={"PLACE": ""}, x=n) for n in range(200)]
        return await asyncio.gather(*(pool.call(call, ignore) for call in calls))

    assert [result.value["y"] for result in use(body)] == [n * n for n in range(200)]


def test_a_pool_outlives_an_event_loop(make):
    async def call(pool, number):
        return await pool.call(make("pid", number, environment={"PLACE": ""}), ignore)

    pool = WorkerPool(1)
    first, second = asyncio.run(call(pool, 1)), asyncio.run(call(pool, 2))
    asyncio.run(pool.close())
    assert first.value == second.value
    assert not alive(first.value["pid"])


def test_nothing_leaks(make):
    def batch():
        run(make("square", x=1), make("vanish", 2, code=1), make("hang", 3, timeout_s=0.05), make("daemon", 4))

    batch()
    before = len(list(Path("/proc/self/fd").iterdir())), children()
    batch()
    assert (len(list(Path("/proc/self/fd").iterdir())), children()) == before


def test_a_worker_does_not_import_loopwright():
    main = Path(sys.modules["loopwright.execution"].__file__).parent / "local" / "worker_main.py"
    program = f"import sys, runpy; runpy.run_path({str(main)!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"loopwright", "pydantic", "rich", "optuna", "numpy", "asyncio"} & set(loaded)
