"""A judge that the guides name."""


def exact(answer: str, label: str) -> float:
    """1 if the answer contains the label."""
    return float(label in answer)
