"""The resource monitor keeps working when a disk takes long to measure, and when a measurement fails."""

import asyncio
import threading

import pytest

from loopwright.execution.sandbox import Bounds
from loopwright.execution.sandbox import disk as disks
from loopwright.execution.sandbox import resource_monitor as monitor
from loopwright.execution.sandbox.disk import MeasuredDisk
from loopwright.execution.sandbox.resource_monitor import MonitoredSandbox, ResourceMonitor, ResourceUsage

SLOW, GREEDY = 1, 2
"""Network namespaces."""


@pytest.fixture
def killed(monkeypatch):
    """The sandboxes whose processes were killed."""
    killed = []
    monkeypatch.setattr(
        monitor, "usage_by_net", lambda: {SLOW: ResourceUsage([1]), GREEDY: ResourceUsage([2], memory_bytes=1000)}
    )
    monkeypatch.setattr(monitor, "kill", lambda net, _pids: killed.append(net))
    return killed


async def supervise(killed, *sandboxes, count=1):
    """Supervise these sandboxes until `count` of them were killed."""
    resource_monitor = ResourceMonitor()
    for sandbox in sandboxes:
        resource_monitor.add(sandbox)
    try:
        async with asyncio.timeout(10):
            while len(killed) < count:
                await asyncio.sleep(0.02)
    finally:
        for sandbox in sandboxes:
            await resource_monitor.remove(sandbox)


def test_a_slow_disk_does_not_delay_other_sandboxes(killed, monkeypatch, tmp_path):
    """Given a sandbox with endless files, the memory bound of another one is enforced."""
    measured = threading.Event()
    monkeypatch.setattr(disks, "size_bytes", lambda *_: measured.wait(30) and 0)
    slow = MonitoredSandbox(SLOW, Bounds(disk_bytes=1), MeasuredDisk((tmp_path,), 1), lambda _: None)
    reasons = []
    greedy = MonitoredSandbox(GREEDY, Bounds(memory_bytes=10), MeasuredDisk((), None), reasons.append)
    try:
        asyncio.run(supervise(killed, slow, greedy))
    finally:
        measured.set()
    assert GREEDY in killed
    assert reasons[0].startswith("memory")


def test_a_failed_measurement_is_repeated(killed, monkeypatch, tmp_path, caplog):
    """Given a machine that fails for a moment, bounds are enforced again afterwards, and the error is logged."""
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
    monkeypatch.setattr(disks, "size_bytes", size_bytes)
    reasons = []
    disk = MeasuredDisk((tmp_path,), 10)
    sandbox = MonitoredSandbox(GREEDY, Bounds(memory_bytes=10, disk_bytes=10), disk, reasons.append)
    asyncio.run(supervise(killed, sandbox, count=4))
    assert {reason.partition(":")[0] for reason in reasons} == {"memory", "disk"}
    assert "no memory" in caplog.text
    assert "du" in caplog.text


def test_a_disk_that_cannot_be_measured_in_time_is_too_large(monkeypatch, tmp_path):
    monkeypatch.setattr("loopwright.execution.files._MEASURE_TIMEOUT_S", 1e-6)
    assert "cannot be measured" in MeasuredDisk((tmp_path,), 10**9).exceeded(())


def test_a_disk_that_loses_more_than_a_sandbox_may_use_is_measured_early(monkeypatch, tmp_path):
    """Given many files, of which a measurement takes long, so that the next one would be much later."""
    free, sizes = [10_000, 9_500, 8_900], [400, 1_500]
    monkeypatch.setattr(disks, "free_bytes", lambda *_: free.pop(0))
    monkeypatch.setattr(disks, "size_bytes", lambda *_: sizes.pop(0))
    disk = MeasuredDisk((tmp_path,), 1_000)
    assert disk.exceeded(()) is None
    for _ in range(2):
        disk._earliest_s, disk._next_s = 0.0, float("inf")
        last = disk.exceeded(())
    assert (last, free, sizes) == ("disk: 1500 bytes of 1000", [], [])
