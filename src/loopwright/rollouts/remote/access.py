"""How a gateway is reached by whoever opens sessions there."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """The address of a gateway and, if it has one, its token."""

    url: str
    token: str | None = field(default=None, repr=False)
    away_s: float = 0.0
    """Seconds that it may be away, where somebody starts it again."""
