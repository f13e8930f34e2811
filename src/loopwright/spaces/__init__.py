"""Spaces: parameters, constraints, draws and encodings."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.spaces.parameter import Choice, ContinuousSpace, Fixed, Parameter, Range
    from loopwright.spaces.space import EnvParamConfig, Space

__all__ = [
    "Choice",
    "ContinuousSpace",
    "EnvParamConfig",
    "Fixed",
    "Parameter",
    "Range",
    "Space",
]

__getattr__ = lazy_exports(__name__)
