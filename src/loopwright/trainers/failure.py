"""How a training fails."""

from loopwright.core.errors import LoopwrightError


class TrainingFailed(LoopwrightError, RuntimeError):
    """Training cannot go on; nothing that was recorded is lost."""
