"""The circuit breaker: a judger that fails again and again is left alone for a while."""


class Breaker:
    """Opens after `failures` in a row; after `cooldown_s` it lets one try through, which closes it or opens it again.

    It is told the time, so that it knows no clock.
    """

    def __init__(self, failures: int, cooldown_s: float) -> None:
        self._limit, self._cooldown_s = failures, cooldown_s
        self._in_a_row = 0
        self.last = ""
        """What went wrong in the last try that failed."""
        self._opens_again_s: float | None = None
        self._probing = False

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next try may be made: 0 while it is closed or a probe is due."""
        if self._opens_again_s is None:
            return 0.0
        if self._probing:
            return self._cooldown_s
        return max(0.0, self._opens_again_s - now_s)

    def enter(self) -> bool:
        """Begin a try, which `wait_s` allowed; whether it is the probe."""
        if self._opens_again_s is None:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A verdict came: all is well again."""
        self._in_a_row, self._opens_again_s, self._probing = 0, None, False

    def failed(self, now_s: float, reason: str, *, probe: bool) -> None:
        """A try failed. Those that were under way when it opened do not keep it open for longer."""
        self._in_a_row, self.last = self._in_a_row + 1, reason
        if probe:
            self._probing = False
        if probe or (self._opens_again_s is None and 0 < self._limit <= self._in_a_row):
            self._opens_again_s = now_s + self._cooldown_s

    def left(self, *, probe: bool) -> None:
        """A try was given up by whoever asked for it, which tells nothing."""
        if probe:
            self._probing = False
