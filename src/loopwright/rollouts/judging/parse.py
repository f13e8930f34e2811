"""From a table in TOML to the config of the judger that its `type` names."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from loopwright.core.config import Explained, explain
from loopwright.core.errors import did_you_mean
from loopwright.rollouts.judger import JudgerConfig, judgers


def parse_judger(raw: Any) -> JudgerConfig:
    """The config of a judger; ValueError says everything that is wrong with it."""
    if isinstance(raw, JudgerConfig):
        return raw
    if isinstance(raw, list | tuple):
        raise ValueError(
            f"{len(raw)} judgers without a rule for combining them. Write "
            '{ type = "composed", parts = [...] }, which adds them up by weight, or give it a `merge` or `routes`'
        )
    if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
        raise ValueError(f"a judger is a table with a `type`. {did_you_mean('', judgers.names())}")
    try:
        kind = judgers.get(raw["type"]).Config
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    except ImportError as error:
        raise ValueError(f"judger {raw['type']!r} cannot be imported: {error}") from error
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise Explained(explain(error, kind)) from error


AnyJudger = Annotated[SerializeAsAny[JudgerConfig], BeforeValidator(parse_judger)]
"""A field for a judger of any type."""
