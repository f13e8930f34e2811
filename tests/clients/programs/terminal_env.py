"""Our Harbor environment with processes that survive a command, as terminus-2's tmux must."""

from loopwright.integrations.harbor_env import LocalEnvironment

_ENDS_PROCESSES = {"--unshare-pid", "--die-with-parent"}


class TerminalEnvironment(LocalEnvironment):
    def _bwrap(self, *words):
        return (word for word in super()._bwrap(*words) if word not in _ENDS_PROCESSES)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        await super().stop(delete)
