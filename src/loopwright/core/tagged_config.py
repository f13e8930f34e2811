"""Fields whose kind is chosen by a `type` key: a table of TOML becomes the config that a registry has by that name."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from loopwright.core.config import Explained, explain
from loopwright.core.errors import did_you_mean
from loopwright.core.registry import Registry


def chosen(registry: Registry[Any]) -> Callable[[Any], BaseModel]:
    """A validator that makes the config which the table's `type` names; ValueError says everything that is wrong."""

    def parse(raw: Any) -> BaseModel:
        if isinstance(raw, BaseModel):
            return raw
        if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
            raise ValueError(f"must be a table with a `type`. {did_you_mean('', registry.names())}")
        try:
            kind = registry.get(raw["type"])
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        except ImportError as error:
            raise ValueError(f"{registry.kind} {raw['type']!r} cannot be imported: {error}") from error
        # Some registries hold configs, others what is configured by one.
        model: type[BaseModel] = kind if issubclass(kind, BaseModel) else kind.Config
        try:
            return model.model_validate(dict(raw))
        except ValidationError as error:
            raise Explained(explain(error, model)) from error
        except Exception as error:  # a class of another package, half written or with validators of its own
            raise ValueError(f"{registry.kind} {raw['type']!r} is broken: {type(error).__name__}: {error}") from error

    return parse
