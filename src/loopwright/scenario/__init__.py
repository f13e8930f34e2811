"""Scenarios: from a TOML file to running objects."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.scenario.kinds.base import LoadedScenario
    from loopwright.scenario.schema import RunConfig, Scenario

__all__ = [
    "LoadedScenario",
    "RunConfig",
    "Scenario",
]

__getattr__ = lazy_exports(__name__)
