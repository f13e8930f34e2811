"""The base of all configuration: strict, frozen, explained under each field."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A typo is an error, a value never changes, and the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
