"""The watch goes on whatever happens: a disk that takes long to measure and a look that fails blind it for nobody."""

import asyncio
import threading

import pytest

from loopwright.execution.sandbox import Bounds
from loopwright.execution.sandbox import resource_monitor as monitor
from loopwright.execution.sandbox.resource_monitor import MonitoredSandbox, ResourceMonitor, ResourceUsage

SLOW, GREEDY = 1, 2
"""Network namespaces, as far as this file goes."""


@pytest.fixture
def ended(monkeypatch):
    """Rooms in which something runs; those whose processes are ended are listed."""
    found = []
    monkeypatch.setattr(
        monitor, "usage_by_net", lambda: {SLOW: ResourceUsage([1]), GREEDY: ResourceUsage([2], memory_bytes=1000)}
    )
    monkeypatch.setattr(monitor, "kill", lambda net, _pids: found.append(net))
    return found


async def watched(ended, *rooms, count=1):
    """ResourceMonitor these rooms until so many were ended."""
    looking = ResourceMonitor()
    for room in rooms:
        looking.add(room)
    try:
        async with asyncio.timeout(10):
            while len(ended) < count:
                await asyncio.sleep(0.02)
    finally:
        for room in rooms:
            await looking.remove(room)


def test_a_disk_that_takes_long_to_measure_blinds_nobody(ended, monkeypatch, tmp_path):
    """Given a room with files without end, then the memory of another is bounded all the same."""
    measured = threading.Event()
    monkeypatch.setattr(monitor, "size_bytes", lambda *_: measured.wait(30) and 0)
    slow = MonitoredSandbox(SLOW, Bounds(disk_bytes=1), (tmp_path,), lambda _: None)
    reasons = []
    greedy = MonitoredSandbox(GREEDY, Bounds(memory_bytes=10), (), reasons.append)
    try:
        asyncio.run(watched(ended, slow, greedy))
    finally:
        measured.set()
    assert GREEDY in ended
    assert reasons[0].startswith("memory")


def test_a_look_that_fails_is_not_the_last(ended, monkeypatch, tmp_path, caplog):
    """Given a machine that fails for a moment, then bounds hold again after it; the log says what was wrong."""
    failures = iter([OSError("no memory")])
    measures = iter([FileNotFoundError("du")])

    def usage():
        for error in failures:
            raise error
        return {GREEDY: ResourceUsage([2], memory_bytes=1000)}

    def size_bytes(*_):
        for error in measures:
            raise error
        return 100

    monkeypatch.setattr(monitor, "_RETRY_S", 0.05)
    monkeypatch.setattr(monitor, "usage_by_net", usage)
    monkeypatch.setattr(monitor, "size_bytes", size_bytes)
    reasons = []
    room = MonitoredSandbox(GREEDY, Bounds(memory_bytes=10, disk_bytes=10), (tmp_path,), reasons.append)
    asyncio.run(watched(ended, room, count=4))
    assert {reason.partition(":")[0] for reason in reasons} == {"memory", "disk"}
    assert "no memory" in caplog.text
    assert "du" in caplog.text


def test_what_cannot_be_measured_in_time_is_too_much(monkeypatch, tmp_path):
    monkeypatch.setattr("loopwright.execution.sandbox.files._MEASURE_TIMEOUT_S", 1e-6)
    room = MonitoredSandbox(SLOW, Bounds(disk_bytes=10**9), (tmp_path,), lambda _: None)
    assert "cannot be measured" in room.exceeded_disk()
