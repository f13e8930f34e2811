"""The ledger: a run's crash-safe record, with its cache, groups and training steps."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.ledger.groups import Groups
    from loopwright.ledger.ledger import Ledger
    from loopwright.ledger.rollouts import Rejudgement, Rollout, groups_of, has_rollouts
    from loopwright.ledger.shared_cache import SharedCache
    from loopwright.ledger.steps import Step
    from loopwright.ledger.trial_book import Observer, RunStopped, TrialBook

__all__ = [
    "Groups",
    "Ledger",
    "Observer",
    "Rejudgement",
    "Rollout",
    "RunStopped",
    "SharedCache",
    "Step",
    "TrialBook",
    "groups_of",
    "has_rollouts",
]

__getattr__ = lazy_exports(__name__)
