"""Trial servers: queue and run trials for runs on other machines."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.rollouts.trial_server.client import TrialServerClient
    from loopwright.rollouts.trial_server.server import TrialServer, TrialServerConfig
    from loopwright.rollouts.trial_server.submission import Submission

__all__ = ["Submission", "TrialServer", "TrialServerClient", "TrialServerConfig"]

__getattr__ = lazy_exports(__name__)
