"""An event loop whose time passes only when everybody waits: hours of back-off in no time, the same each time."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    loop = None

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.loop.now_s += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.now_s = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now_s


def simulate(main):
    """Run a coroutine; its result and the seconds that passed."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
