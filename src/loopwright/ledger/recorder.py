"""The recorder: writes live trials to the ledger in batches, at least every second, without delaying the steps."""

import threading
from collections.abc import Callable
from typing import Any

import orjson

from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger

_PLAIN = '{"parts":{},"more":[]}'
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_MOST_ROWS = 10_000
_OK = Outcome.OK.value  # a plain string: sqlite3 takes a fifth longer over a row with an enum in it

Step = tuple[int, int, Any, int | None, str, Any, float, float]
"""Number, episode, action, draw, regime as JSON, observation, reward, time."""
_STEP_WIDTH = 8


def as_json(value: Any) -> bytes:
    """Any sample of a space as JSON, arrays included; other objects as their repr."""
    try:
        return orjson.dumps(value, option=_NUMPY)
    except TypeError:  # rare, and the options cost time in every step

        def plain(value: Any) -> Any:
            # orjson leaves arrays that are not C-contiguous to us; other objects have no JSON.
            return value.tolist() if hasattr(value, "tolist") else repr(value)

        return orjson.dumps(value, option=_NUMPY | orjson.OPT_NON_STR_KEYS, default=plain)


class Recorder:
    """Queues steps and writes them from its own thread.

    A step costs its caller one `append`. It is in the ledger after `flush`, and a second later at the latest. If the
    disk is full, the next `add_episode` or `flush` raises. `unfinished` returns row and facts of the episodes in
    progress, if only whole episodes are recorded: they are stored for a resumed run.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        every_s: float = 0.5,
        unfinished: Callable[[], list[tuple[tuple[Any, ...], dict[str, Any]]]] = list,
    ) -> None:
        self._ledger, self._every_s, self._unfinished = ledger, every_s, unfinished
        self._trials: list[tuple[Any, ...]] = []  # steps and rows, in the order of their numbers
        self._episodes: list[tuple[int, bytes]] = []
        self._writing = threading.Lock()
        self._wake, self._closed = threading.Event(), False
        self._failure: LoopwrightError | None = None
        self.add: Callable[[Step], None] = self._trials.append
        """Add a successful step."""
        self._thread = threading.Thread(target=self._work, name="loopwright-recorder", daemon=True)
        self._thread.start()

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Add a trial as the row that it will be (see Ledger.append): a failed step, or a whole episode."""
        self._trials.append(row)

    def add_episode(self, last: int, facts: dict[str, Any]) -> None:
        """Add an episode that ended."""
        self._episodes.append((last, as_json(facts)))
        self.keep_up()

    def keep_up(self) -> None:
        """Write now if steps arrive faster than the thread writes them, so that memory stays bounded."""
        if self._failure is not None:
            raise self._failure
        if len(self._trials) > 2 * _MOST_ROWS:
            self._write()
        elif len(self._trials) > _MOST_ROWS:
            self._wake.set()

    def flush(self) -> None:
        """Write everything to the ledger before returning."""
        self._write()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(self._every_s)
            self._wake.clear()
            if self._failure is None:
                self._write()

    def _write(self) -> None:
        with self._writing:
            # Read first: an episode that ends right now is then among the rows below, or still in progress here.
            unfinished = self._unfinished()
            # The lists stay the same objects, since `add` is bound to one: copy what is there, keep what is added.
            trials, episodes = self._trials[:], self._episodes[:]
            if not (trials or episodes or unfinished):
                return
            rows = [_row(trial) if len(trial) == _STEP_WIDTH else trial for trial in trials]
            try:
                self._ledger.append(rows, episodes, unfinished)
            except LoopwrightError as error:
                self._failure = error
                return
            del self._trials[: len(trials)], self._episodes[: len(episodes)]


def _row(step: tuple[Any, ...]) -> tuple[Any, ...]:
    number, episode, action, draw, regime, observation, reward, at = step
    return (
        number,
        episode,
        as_json(action).decode(),
        draw,
        regime,
        _OK,
        None,
        "",
        reward,
        _PLAIN,
        as_json({"observation": observation}).decode(),
        at,
        at,
    )
