"""Config fields with a `type` key: a table of TOML becomes the config of the class that a registry has by that name."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from loopwright.core.config import Explained, explain
from loopwright.core.errors import did_you_mean
from loopwright.core.registry import Registry


def config_parser(registry: Registry[Any]) -> Callable[[Any], BaseModel]:
    """A validator that turns a table into the config that its `type` names; a ValueError lists everything wrong."""

    def parse(raw: Any) -> BaseModel:
        if isinstance(raw, BaseModel):
            return raw
        if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
            raise ValueError(f"must be a table with a `type`. {did_you_mean('', registry.names())}")
        try:
            item = registry.get(raw["type"])
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        except ImportError as error:
            raise ValueError(f"{registry.kind} {raw['type']!r} cannot be imported: {error}") from error
        # Some registries hold configs, others the classes that they configure.
        model: type[BaseModel] = item if issubclass(item, BaseModel) else item.Config
        try:
            return model.model_validate(dict(raw))
        except ValidationError as error:
            raise Explained(explain(error, model)) from error
        except Exception as error:  # a user's class may be half written, or have validators that fail
            raise ValueError(f"{registry.kind} {raw['type']!r} is broken: {type(error).__name__}: {error}") from error

    return parse
