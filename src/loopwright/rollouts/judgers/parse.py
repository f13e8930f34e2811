"""From a table in TOML to the config of the judger that its `type` names."""

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from loopwright.core.tagged_config import config_parser
from loopwright.rollouts.judgers.base import JudgerConfig, judgers

_judger = config_parser(judgers)


def parse_judger(raw: Any) -> JudgerConfig:
    """The config of a judger; ValueError says everything that is wrong with it."""
    if isinstance(raw, list | tuple):
        raise ValueError(
            f"{len(raw)} judgers without a rule for combining them. Write "
            '{ type = "composed", parts = [...] }, which adds them up by weight, or give it a `merge` or `routes`'
        )
    config = _judger(raw)
    if not isinstance(config, JudgerConfig):
        raise ValueError(f"{type(config).__name__} is not the config of a judger")
    return config


AnyJudger = Annotated[SerializeAsAny[JudgerConfig], BeforeValidator(parse_judger)]
"""A field for a judger of any type."""
