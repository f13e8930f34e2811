"""How a training fails."""

from pathlib import Path

from loopwright.core.errors import LoopwrightError


class TrainingFailed(LoopwrightError, RuntimeError):
    """Training cannot go on; nothing that was recorded is lost."""


def foreign(directory: Path, name: str) -> TrainingFailed:
    """A checkpoint that does not fit what is trained."""
    return TrainingFailed(
        f"{directory} is a checkpoint of another model, of other adapters or of another algorithm: {name!r} is not in "
        "it, or has another shape. Resume with the settings that it was made with, or begin anew in another --output."
    )
