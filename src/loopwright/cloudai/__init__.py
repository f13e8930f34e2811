"""CloudAI's files (a system, tests, a scenario) as a scenario of Loopwright. Nothing else knows their format."""

from loopwright.cloudai.convert import Conversion, convert

__all__ = ["Conversion", "convert"]
