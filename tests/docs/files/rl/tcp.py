"""A formula instead of the TCP transfers of `examples/regimes/tcp.py`, which need root."""


def transfer(drop_percent: float, rate_mbit: int, congestion: str, connections: int) -> dict[str, float]:
    """Several connections are worth their price on a lossy link only."""
    speed = 1.0 if congestion == "bbr" else 1.0 / (1.0 + drop_percent)
    return {"utility": min(1.0, speed * connections * 50 / rate_mbit) - 0.05 * connections}
