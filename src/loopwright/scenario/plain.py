"""Plain runs: which of them wait for which, and when each starts.

They run one after another, so that no measurement disturbs another one. Only a run that asks for it, by `after_start`,
runs beside others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from loopwright.core.errors import did_you_mean
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.base import RunKind

log = logging.getLogger(__name__)
_WAIT_S = 0.05
Execute = Callable[[RunKind, Callable[[], None]], int]
"""Executes a run and returns its code; the second argument is called once the run's own process has started."""


def check_dependencies(tables: Sequence[Mapping[str, Any]], checker: Checker) -> None:
    """Report dependencies on unknown or agent-driven runs, cycles, and devices that two runs would share."""
    runs = {table["name"]: table for table in tables if isinstance(table.get("name"), str)}
    graph: dict[str, dict[str, Any]] = {}
    for name, table in runs.items():
        checker.suffix = f" (run {name!r})"
        others = table.get("depends_on", {})
        if not isinstance(others, dict | list) or not all(isinstance(other, str) for other in others):
            others = {}  # reported as a bad value of its key
        graph[name] = others if isinstance(others, dict) else dict.fromkeys(filter(runs.get, others), "after_ok")
        if others and "agent" in table:
            checker.add("[[run]] depends_on", "a run with an agent cannot depend on others; remove it.")
        for other in others:
            if other not in runs:
                checker.add("[[run]] depends_on", f"there is no run {other!r}. {did_you_mean(str(other), list(runs))}")
            elif "agent" in runs[other]:
                checker.add("[[run]] depends_on", f"{other!r} has an agent; a run can only wait for plain runs.")
    checker.suffix = ""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        checker.add("[[run]] depends_on", f"these runs wait for one another: {' → '.join(reversed(error.args[1]))}.")
    workloads = {name: table.get("workload") for name, table in runs.items()}
    using = [name for name, workload in workloads.items() if isinstance(workload, dict) and workload.get("gpus")]
    is_concurrent = any("after_start" in others.values() for others in graph.values())
    if checker.system.type == "local" and len(using) > 1 and is_concurrent:
        text = f"with after_start only one run can use GPUs of this machine, not {', '.join(using)}. Split the file."
        checker.add("[run.workload] gpus", text)


class PlainRuns:
    """Executes plain runs in an order that their dependencies allow, in the order of the file where it is free."""

    def __init__(self, runs: Sequence[RunKind], execute: Execute) -> None:
        self._execute = execute
        self._waiting: dict[str, Mapping[str, str]] = {run.name: run.depends_on for run in runs}
        self._runs = {run.name: run for run in runs}
        self._active: dict[Future[int], str] = {}
        self._started: set[str] = set()
        self._codes: dict[str, int] = {}
        """The codes of the runs that have ended."""
        self._skipped: set[str] = set()

    def run(self, is_stopping: Callable[[], bool], stop: Callable[[], None]) -> int:
        """All codes together. If a run raises, `stop` ends the others, and the exception is raised afterwards."""
        if not any("after_start" in conditions.values() for conditions in self._waiting.values()):
            while (name := self._next()) is not None and not is_stopping():
                self._codes[name] = self._execute(self._runs[name], lambda: None)
            return self._code()
        with ThreadPoolExecutor(len(self._runs), "loopwright-run") as threads:
            try:
                while (self._waiting or self._active) and not (is_stopping() and not self._active):
                    while not is_stopping() and (name := self._next()) is not None:
                        future = threads.submit(self._execute, self._runs[name], partial(self._started.add, name))
                        self._active[future] = name
                    for future in wait(self._active, _WAIT_S, FIRST_COMPLETED).done:
                        self._codes[self._active.pop(future)] = future.result()
            except BaseException:
                stop()
                raise
        return self._code()

    def _code(self) -> int:
        code = 1 if self._skipped else 0
        for one in self._codes.values():
            code |= one
        return code

    def _next(self) -> str | None:
        """The next run to start now, taken off the waiting list; None if all have to wait."""
        for name, conditions in list(self._waiting.items()):
            if any(self._never_holds(other, condition) for other, condition in conditions.items()):
                del self._waiting[name]
                self._skipped.add(name)
                log.error("run %r was not started: a run that it depends on has failed", name)
        active = self._active.values()
        needed = self._needed()
        for name, conditions in self._waiting.items():
            is_ready = all(self._holds(other, condition) for other, condition in conditions.items())
            if is_ready and (name in needed or not active):
                del self._waiting[name]
                return name
        return None

    def _holds(self, other: str, condition: str) -> bool:
        if condition == "after_start":
            return other in self._started or other in self._codes
        if condition == "after_ok":
            return self._codes.get(other) == 0
        return other in self._codes or other in self._skipped

    def _never_holds(self, other: str, condition: str) -> bool:
        has_failed = condition == "after_ok" and self._codes.get(other, 0) != 0
        return has_failed or (other in self._skipped and condition != "after_any")

    def _needed(self) -> set[str]:
        """What must run beside the active runs: whatever waits for their start, and what that waits for."""
        active = set(self._active.values())
        todo = [
            name
            for name, conditions in self._waiting.items()
            if any(other in active and condition == "after_start" for other, condition in conditions.items())
        ]
        needed: set[str] = set()
        while todo:
            name = todo.pop()
            if name in self._waiting and name not in needed:
                needed.add(name)
                todo += self._waiting[name]
        return needed
