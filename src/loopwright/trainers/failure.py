"""Errors of training."""

from pathlib import Path

from loopwright.core.errors import LoopwrightError


class TrainingFailed(LoopwrightError, RuntimeError):
    """Training cannot continue; nothing that was recorded is lost."""


def wrong_checkpoint(directory: Path, name: str) -> TrainingFailed:
    """The error for a checkpoint that does not fit what is trained."""
    return TrainingFailed(
        f"{directory} is a checkpoint of another model, other adapters or another algorithm: {name!r} is missing or "
        "has another shape. Resume with the settings of that checkpoint, or start again in another --output."
    )
