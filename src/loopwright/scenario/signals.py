"""Signals: the first SIGINT, SIGTERM or SIGHUP stops a campaign in good order, the second one at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from loopwright.core.runtime import is_ignored
from loopwright.ledger.trial_book import TrialBook


class Signals:
    """The signal that was received, if any. It stops the run in progress, which the dispatcher sets."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.book: TrialBook | None = None

    @property
    def exit_code(self) -> int | None:
        """130 for SIGINT, 143 for SIGTERM, 129 for a closed terminal, None without a signal."""
        return None if self.received is None else 128 + self.received

    def handle(self, number: int, _: FrameType | None = None) -> None:
        """Stop the run. A second signal kills all its processes and exits; the ledger stays consistent."""
        if self.received is not None:
            if self.book is not None:
                self.book.kill()
            os._exit(128 + number)
        self.received = number
        if self.book is not None:
            self.book.stop()

    @contextmanager
    def installed(self) -> Iterator["Signals"]:
        """Handle signals inside the context. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # Signals that were ignored when the process started stay ignored, as `nohup` and background jobs expect.
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if not is_ignored(n)]
        before = {number: signal.signal(number, self.handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
