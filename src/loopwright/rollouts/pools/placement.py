"""Where the workers of a pool live, as configuration: the same keys for loops and judgers."""

from typing import Any

from pydantic import Field, field_validator

from loopwright.core.config import Config, size_bytes


class PlacementConfig(Config):
    """How many workers there are, and what each of them needs."""

    workers: int = Field(default=0, ge=0)
    """0: in this process; 1: in one Ray actor; more: in that many behind a router."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of each worker."""
    memory: int | None = Field(default=None, gt=0)
    """Memory of each worker, for example "1GiB"."""

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)
