"""The event loop of this process, which ends even if user code does not."""

import asyncio
import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
_GRACE_S = 5.0
"""How long tasks and threads get to end once the main coroutine has returned."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but tasks that ignore cancellation and threads that hang are named and abandoned.

    Runs on uvloop if it is installed: that makes a small rollout a fifth cheaper.
    """
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        from uvloop import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.get_loop().set_default_executor(_DaemonThreads())
        try:
            return runner.run(main)
        finally:
            runner.run(_abandon_tasks())


async def _abandon_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, stubborn = await asyncio.wait(tasks, timeout=_GRACE_S)
    names = Counter[str]()
    for task in stubborn:
        name = task.get_name()
        names[getattr(task.get_coro(), "__qualname__", name) if name.startswith("Task-") else name] += 1
    for name, count in names.items():
        times = f" ({count} times)" if count > 1 else ""
        log.warning("%s ignored its cancellation for %g s and is abandoned%s", name, _GRACE_S, times)
    for task in stubborn:
        # Never deleted, since code that ignores its cancellation may ignore that, too, for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
        asyncio._unregister_task(task)  # otherwise the runner waits for it, without a limit
        task._log_destroy_pending = False  # type: ignore[attr-defined]


class _DaemonThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`. One that hangs delays the end of the process, but does not prevent it."""

    def __init__(self) -> None:
        super().__init__(min(32, (os.cpu_count() or 1) + 4), "asyncio")
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._alive: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call a function in a thread."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and len(self._alive) < self._max_workers:
            thread = threading.Thread(target=self._serve, name=f"to_thread-{len(self._alive)}", daemon=True)
            self._alive.append(thread)
            thread.start()
        return future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  raised to the caller
                    future.set_exception(error)
            self._idle.release()

    def shutdown(self, wait: bool = True, **_options: Any) -> None:
        """Wait for the threads, at most a few seconds."""
        for _ in self._alive:
            self._calls.put(None)
        end_s = time.monotonic() + _GRACE_S
        for thread in self._alive if wait else ():
            thread.join(max(0.0, end_s - time.monotonic()))
        if hanging := [thread.name for thread in self._alive if wait and thread.is_alive()]:
            log.warning("threads that did not end within %g s are abandoned: %s", _GRACE_S, ", ".join(hanging))
