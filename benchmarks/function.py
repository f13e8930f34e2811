"""The callable that the benchmarks search over; ours runs it in workers, the peer in its own process."""


def bowl(x: float, y: float, z: float) -> dict[str, float]:
    """Something small with three knobs."""
    return {"loss": (x - 0.3) ** 2 + (y + 1.0) ** 2 + abs(z - 5)}


def nothing(n: int) -> dict[str, float]:
    """No work at all."""
    return {"y": float(n)}
