"""Progress: intermediate metrics that the measured program itself reports, so that a hopeless trial can be stopped."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar

Reporter = Callable[[int, Mapping[str, float]], bool]
"""Takes a step and its metrics; returns whether the trial should stop."""

PROGRESS_VARIABLE = "LOOPWRIGHT_PROGRESS"
"""Names the file that a command's reports go to, one JSON object per line."""
reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)
"""Where reports go in a function that runs in this process."""


class TrialStopped(BaseException):
    """Raised by `report` in a trial that a stop rule ends. Clean up and let it pass."""


def report(step: int, **metrics: float) -> None:
    """Report the metrics of a step: `loopwright.report(epoch, loss=0.3)`. Outside a trial it does nothing.

    Raises TrialStopped if the run's `stop` rule ends the trial here. Steps must increase; others are ignored.
    """
    # In a worker, `execution/local/worker_main.py` is the main module; it imports nothing of Loopwright.
    worker: Reporter | None = getattr(sys.modules.get("__main__"), "loopwright_report", None)
    if (sink := reporter.get() or worker) is not None:
        if sink(step, metrics):
            raise TrialStopped(f"stopped at step {step}")
    elif path := os.environ.get(PROGRESS_VARIABLE):
        line = json.dumps({"step": int(step), **{name: float(value) for name, value in metrics.items()}})
        with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123  one write, so that lines stay whole
            file.write(f"{line}\n")
