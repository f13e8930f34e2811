"""A campaign as the benchmarks run it: the whole spine in this process, without starting an interpreter."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from loopwright.scenario.dispatch import build, drive
from loopwright.scenario.load import load

MEMORY = Path("/dev/shm")


@contextmanager
def campaigns(scenario: str, trials: int, *, on_disk: bool = False) -> Iterator[Callable[[], None]]:
    """A function that runs a scenario to its end, each time in a new directory."""
    # Against a peer that writes nothing, memory: some disks make a file in 20 µs and in 1 ms within the same minute.
    memory = None if on_disk or not MEMORY.is_dir() else MEMORY
    directory = Path(tempfile.mkdtemp(prefix="loopwright-bench-", dir=memory))
    file = directory / "scenario.toml"
    file.write_text(scenario)
    numbers = count(1)
    loaded = load(file)

    def campaign() -> None:
        built = build(loaded, loaded.runs[0], directory / f"out-{next(numbers)}")
        try:
            assert drive(built.agent) == 0
            assert built.env.book.ledger.counts()["ok"] == trials
        finally:
            built.resources.close()

    try:
        yield campaign
    finally:
        shutil.rmtree(directory)
