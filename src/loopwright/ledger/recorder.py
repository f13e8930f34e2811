"""The recorder: live trials into the ledger in batches, at least every second, without holding up the steps."""

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


def as_json(value: Any) -> bytes:
    """Any sample of a space, arrays included; what is no data at all is shown as it shows itself."""
    try:
        return orjson.dumps(value, option=_NUMPY)
    except TypeError:  # rare, and asking for it beforehand costs every step
        return orjson.dumps(value, option=_NUMPY | orjson.OPT_NON_STR_KEYS, default=_plain)


def _plain(value: Any) -> Any:
    # numpy's arrays that are not laid out as C does are left to us; others have no JSON.
    return value.tolist() if hasattr(value, "tolist") else repr(value)


class Recorder:
    """Takes steps as they are and writes them from a thread of its own.

    A step costs its caller one `append`. Whatever was added is in the ledger after `flush`, and a second later at the
    latest. A disk that takes no more is told to the caller at the next `add` or `flush`. `unfinished` gives the row and
    the facts of an episode in progress, where only whole episodes are added: they are kept aside for a resumed run.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        every_s: float = 0.5,
        unfinished: Callable[[], tuple[tuple[Any, ...], dict[str, Any]] | None] = lambda: None,
    ) -> None:
        self._ledger, self._every_s, self._unfinished = ledger, every_s, unfinished
        self._steps: list[Step] = []
        self._rows: list[tuple[Any, ...]] = []
        self._episodes: list[tuple[int, bytes]] = []
        self._writing = threading.Lock()
        self._wake, self._closed = threading.Event(), False
        self._failure: LoopwrightError | None = None
        self.add = self._steps.append
        """Add a step that ended well."""
        self._thread = threading.Thread(target=self._work, name="loopwright-recorder", daemon=True)
        self._thread.start()

    def add_row(self, row: tuple[Any, ...]) -> None:
        """Add a trial as the row that it will be (see Ledger.append): a failed step, or a whole episode."""
        self._rows.append(row)

    def add_episode(self, last: int, facts: dict[str, Any]) -> None:
        """Add an episode that ended."""
        self._episodes.append((last, as_json(facts)))
        self.keep_up()

    def keep_up(self) -> None:
        """Write here and now if steps come faster than the thread writes them, so that memory stays bounded."""
        if self._failure is not None:
            raise self._failure
        if len(self._steps) > 2 * _MOST_ROWS:
            self._write()
        elif len(self._steps) > _MOST_ROWS:
            self._wake.set()

    def flush(self) -> None:
        """Have everything in the ledger when this returns."""
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
            # Asked first: an episode that ends right now is then among the rows below, or still in progress here.
            unfinished = self._unfinished()
            # The lists stay the same objects, since `add` is bound to one: take what is there, leave what comes.
            steps, rows, episodes = self._steps[:], self._rows[:], self._episodes[:]
            if not (steps or rows or episodes or unfinished):
                return
            trials = [*map(_row, steps), *rows]
            trials.sort(key=lambda row: row[0])
            try:
                self._ledger.append(trials, episodes, unfinished)
            except LoopwrightError as error:
                self._failure = error
                return
            del self._steps[: len(steps)], self._rows[: len(rows)], self._episodes[: len(episodes)]


def _row(step: Step) -> tuple[Any, ...]:
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
