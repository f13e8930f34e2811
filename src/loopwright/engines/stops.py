"""Stop texts: where a turn ends that has said one."""

from collections.abc import Sequence

from loopwright.engines.tokenizer import Tokenizer


def stopped(tokenizer: Tokenizer, said: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last of these tokens ends a stop text."""
    if not stop:
        return False
    # A text spans as many tokens as it has bytes, at most.
    tail = tokenizer.decode(said[-max(len(text.encode("utf-8", "replace")) for text in stop) :])
    return any(text in tail for text in stop)
