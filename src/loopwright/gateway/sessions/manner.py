"""The manner of a turn: what an agent asks of it beyond messages and sampling. It is kept with the call."""

from loopwright.core.config import Config


class Manner(Config):
    """How a turn is opened and read."""

    given: str = ""
    """How its message begins: given to the policy, not sampled, and never trained on."""
    shown: bool = True
    """Whether the client is shown that beginning; one who wrote it has it already."""
    note: str = ""
    """What the policy is told last, before it speaks; no message of the conversation."""
    calls: bool = True
    """Whether tool calls are read; otherwise they are text."""
    single: bool = False
    """Whether the turn ends where a second call would begin."""

    @property
    def written(self) -> str:
        """As JSON, as it is stored; most turns are plain."""
        return "{}" if self is PLAIN else self.model_dump_json(exclude_defaults=True)


PLAIN = Manner()
