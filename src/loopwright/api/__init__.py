"""The Python front door: `tune`, `run`, `rollout` and `Study`. Users import these names from `loopwright` itself."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.api.ask_tell import AskTellError, PendingTrial
    from loopwright.api.study import BestResult, NoResult, Report, Study, Trials

__all__ = [
    "AskTellError",
    "BestResult",
    "NoResult",
    "PendingTrial",
    "Report",
    "Study",
    "Trials",
]

__getattr__ = lazy_exports(__name__)
