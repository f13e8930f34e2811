"""The answer to a step, field by field: what a server may give, and what is said of anything else."""

from contextlib import suppress
from numbers import Real
from typing import Any

from loopwright.envs.live.server import ServerError

_FIELDS = ("observation", "reward", "terminated", "truncated", "info")
_LONGEST = 80


def real(reward: Any) -> float:
    """A reward that is no float as it stands: another kind of real number, but neither a text nor true or false."""
    # Of numpy a number may also come as an array without dimensions.
    plain = reward[()] if getattr(reward, "shape", None) == () else reward
    if type(plain) is not bool and isinstance(plain, Real):
        with suppress(OverflowError):
            return float(plain)
    raise ServerError(f"reward: {shown(reward)} where a number is due")


def flag(field: str, value: Any) -> bool:
    """`terminated` or `truncated`: a bool, or numpy's."""
    if type(value) is bool or (getattr(value, "shape", None) == () and value.dtype.name == "bool"):
        return bool(value)
    raise ServerError(f"{field}: {shown(value)} where true or false is due")


def unusable(answer: Any, error: Exception) -> str:
    """What is wrong with the answer that caused this error, the field's name first."""
    if isinstance(error, ServerError):
        return str(error)
    with suppress(TypeError, LookupError):
        if len(answer) == len(_FIELDS) and not isinstance(answer[-1], dict):
            return f"info: {shown(answer[-1])} where a dict is due"
    return f"'step' gave {shown(answer)} where ({', '.join(_FIELDS)}) is due"


def shown(value: Any) -> str:
    """A value in a sentence, if need be its beginning."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}…"
