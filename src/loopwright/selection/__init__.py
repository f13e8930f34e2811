"""Selection: which configuration to recommend, and the fresh measurements that confirm it."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.selection.estimate import Estimate
    from loopwright.selection.plan import ConfirmConfig
    from loopwright.selection.recommendation import Candidate, Recommendation, recommend
    from loopwright.selection.trials import StoredTrial, stored_trials

__all__ = [
    "Candidate",
    "ConfirmConfig",
    "Estimate",
    "Recommendation",
    "StoredTrial",
    "recommend",
    "stored_trials",
]

__getattr__ = lazy_exports(__name__)
