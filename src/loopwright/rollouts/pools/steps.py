"""Which call's code runs on an event loop at any moment: who blocks it, and who ended the process.

An event loop runs one step of one task at a time. A step that blocks takes time from all other calls, whose deadlines
are then moved; a step during which the process dies was its cause; a step that never ends is interrupted.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from functools import partial
from types import FrameType
from typing import Any

BLOCKED_S = 0.25
"""A step that takes longer than this blocks the event loop."""
BLOCKING_HINT = "Use an asynchronous client, or `await asyncio.to_thread(...)` for code that blocks"
_WARNING_S = 10.0
"""For how long a step may block the event loop without a warning while it does."""
_SIGNAL = signal.SIGRTMIN + 10
"""An unused signal, as that of the watchdog of live environments."""
_TICK_S = 0.5
log = logging.getLogger(__name__)


class StepInterrupted(BaseException):
    """Raised in code that does not end or ignores its cancellation. Not an Exception, so it is rarely swallowed."""


class WatchedCall:
    """A call in progress."""

    def __init__(self, number: int = 0, limit_s: float | None = None) -> None:
        self.number = number
        self.name = ""
        """What its code is called in messages."""
        self.watch: StepWatch | None = None
        self.limit_s = limit_s
        """How long one of its steps may take before it is interrupted, if the watch does that."""
        self.blocked_s = 0.0
        """How long its own code has blocked the event loop in earlier steps."""
        self.step_start_s: float | None = None
        """When its current step began, on the event loop's clock."""
        self.is_stubborn = False
        """Whether its code has ignored a cancellation, so that the next one is a StepInterrupted."""
        self.on_stall: list[Callable[[float], object]] = []
        """Called with the seconds that another call has blocked the event loop, to move a deadline."""
        self.hopeless = ""
        """Why its code will never end, whatever is done to it; empty if it may."""
        self.on_give_up: Callable[[], object] = lambda: None
        """Called once that is known, so that nobody waits for it any more."""

    def give_up(self, reason: str) -> None:
        """Its code ignores everything: leave it where it is."""
        self.hopeless = reason
        self.on_give_up()

    def blocked_s_until_now(self) -> float:
        """How long its own code has blocked the event loop, the current step included."""
        if self.step_start_s is None:
            return self.blocked_s
        step_s = asyncio.get_running_loop().time() - self.step_start_s
        return self.blocked_s + (step_s if step_s >= BLOCKED_S else 0.0)

    def describe_blocking(self, name: str, deadline_s: float) -> str:
        """Why it has not ended in time, if it has blocked the event loop."""
        blocked_s = self.blocked_s_until_now()
        rounded_s = round(blocked_s, 1 if blocked_s < 1 else None)  # so that summaries count equal reasons
        start = f"not finished within {deadline_s:g} s; {name} blocked the event loop for {rounded_s} s"
        return f"{start}. {BLOCKING_HINT}"


current_call: ContextVar[WatchedCall | None] = ContextVar("current_call", default=None)
"""The call that the running code belongs to."""


class StepWatch:
    """Watches the calls of one event loop. `mark` records the number of the call that runs, 0 for none."""

    def __init__(self, mark: Callable[[int], None] | None = None) -> None:
        self._mark = mark
        self._calls: set[WatchedCall] = set()
        self._current: WatchedCall | None = None
        """The call whose step runs."""
        self._steps_begun = self._overdue_step = 0
        self._closed = threading.Event()

    def start(self, call: WatchedCall, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Run the code of a call as a task, and what it creates as tasks."""
        call.watch, call.name, context = self, name, copy_context()
        context.run(current_call.set, call)
        self._calls.add(call)
        steps = _Steps(self, call, work)
        task = asyncio.Task(steps, loop=asyncio.get_running_loop(), name=name, context=context)
        task.add_done_callback(lambda _: self._calls.discard(call))
        return task

    def interrupt(self) -> None:
        """From now on, interrupt steps that take longer than their call's limit: a sleep or a loop in Python.

        Only in the main thread: others cannot be interrupted. Native code that does not return cannot be, either.
        """
        thread = threading.current_thread()
        if thread is not threading.main_thread() or thread.ident is None:
            return
        if signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            signal.signal(_SIGNAL, _interrupt_overdue)  # stays installed: without watches it does nothing
        if signal.getsignal(_SIGNAL) is _interrupt_overdue:
            _interrupting.append(self)
            self.when_overdue(lambda _: signal.pthread_kill(thread.ident or 0, _SIGNAL))

    def when_overdue(self, act: Callable[[WatchedCall], object], patience_s: float = 0.0) -> None:
        """From now on, call this in a thread if a step takes longer than its call's limit and this; at each tick."""
        self._closed.clear()
        threading.Thread(
            target=self._watch_limits, args=(act, patience_s), name="loopwright-steps", daemon=True
        ).start()

    def close(self) -> None:
        """Interrupt no more steps."""
        self._closed.set()
        if self in _interrupting:
            _interrupting.remove(self)

    def _watch_limits(self, act: Callable[[WatchedCall], object], patience_s: float) -> None:
        last_step, waited_s, warned = 0, 0.0, False
        # Ticks are counted instead of time: a process that was suspended (Ctrl-Z) has not been waiting.
        while not self._closed.wait(_TICK_S):
            call, step = self._current, self._steps_begun
            waited_s = waited_s + _TICK_S if step == last_step else 0.0
            last_step = step
            if call is not None and waited_s >= _WARNING_S and not warned:
                warned = True
                log.warning("%s blocks the event loop for %g s so far. %s", call.name, waited_s, BLOCKING_HINT)
            if call is None or call.limit_s is None or waited_s < call.limit_s + patience_s:
                continue
            self._overdue_step = step
            act(call)  # again at each tick: its code may have swallowed the first signal

    @property
    def is_overdue(self) -> bool:
        """Whether the step that runs is the one to interrupt."""
        return self._current is not None and self._steps_begun == self._overdue_step

    def begin_step(self, call: WatchedCall, now_s: float) -> None:
        """Code of this call runs now."""
        call.step_start_s, self._current = now_s, call
        self._steps_begun += 1
        if self._mark is not None:
            self._mark(call.number)

    def end_step(self, call: WatchedCall, now_s: float) -> None:
        """It has returned, or waits for something."""
        seconds = 0.0 if call.step_start_s is None else now_s - call.step_start_s
        call.step_start_s = self._current = None
        if self._mark is not None:
            self._mark(0)
        if seconds >= BLOCKED_S:
            call.blocked_s += seconds
            for other in self._calls - {call}:
                for move_deadline in other.on_stall:
                    move_deadline(seconds)


_interrupting: list[StepWatch] = []


def _interrupt_overdue(_number: int, _frame: FrameType | None) -> None:
    if any(watch.is_overdue for watch in _interrupting[:]):
        raise StepInterrupted


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine of a call, which tells the watch of its steps."""

    def __init__(self, watch: StepWatch, call: WatchedCall, work: Coroutine[Any, Any, Any]) -> None:
        self._watch, self._call, self._work = watch, call, work
        self._clock = asyncio.get_running_loop().time

    def send(self, value: Any) -> Any:
        self._watch.begin_step(self._call, self._clock())
        try:
            return self._work.send(value)
        except SystemExit as error:
            raise _exit_of_task(error) from error
        finally:
            self._watch.end_step(self._call, self._clock())

    def throw(self, error: Any, *_: Any) -> Any:
        if self._call.is_stubborn and isinstance(error, asyncio.CancelledError):
            error = StepInterrupted()
        self._watch.begin_step(self._call, self._clock())
        try:
            return self._work.throw(error)
        except SystemExit as exit:
            raise _exit_of_task(exit) from exit
        finally:
            self._watch.end_step(self._call, self._clock())

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:  # what describes a coroutine, such as its name
        return getattr(self._work, name)


def _exit_of_task(error: SystemExit) -> RuntimeError:
    """What is raised instead in a task that a call has created: a SystemExit would end the event loop."""
    return RuntimeError(f"a task raised {error!r}, which would have ended more than its call")


def watch_tasks() -> None:
    """From now on, watch the tasks that calls create on the running event loop, too."""
    loop = asyncio.get_running_loop()
    create = loop.get_task_factory()
    if not (isinstance(create, partial) and create.func is _create_task):
        loop.set_task_factory(partial(_create_task, create or _new_task))


def _create_task(create: Callable[..., Any], loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
    call = current_call.get()
    watched = work if call is None or call.watch is None else _Steps(call.watch, call, work)
    return create(loop, watched, **options)


def _new_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.Task(work, loop=loop, **options)
