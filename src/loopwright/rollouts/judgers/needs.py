"""What a judger needs, where a config says it: names of facts, checked when the config is built."""

from typing import Annotated

from pydantic import AfterValidator

from loopwright.core.errors import did_you_mean
from loopwright.rollouts.judgers.base import FACTS


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in FACTS:
            raise ValueError(f"a judger cannot need {name!r}. {did_you_mean(name, FACTS)}")
    return names


Needs = Annotated[tuple[str, ...], AfterValidator(_known)]
