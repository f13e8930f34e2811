"""How this process runs: its event loop, and the signals that it inherited as ignored.

Under `nohup` and in a script's background jobs, some signals are ignored from the start. They stay ignored here, but
the processes that Loopwright starts get the default handling: a trial that is sent SIGINT ends, however Loopwright was
started.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a handler is not inherited: executing a program resets it to the default."""


def shield_children() -> None:
    """Replace SIG_IGN by `ignore`, so that children do not inherit it. Only the main thread can; others do nothing."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, ignore)


def is_ignored(number: int) -> bool:
    """Whether this process was started with the signal ignored, and should keep ignoring it."""
    return signal.getsignal(number) in (signal.SIG_IGN, ignore)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on uvloop if it is installed: that makes a small rollout a fifth cheaper."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
