"""The judger of the README's rollouts."""


def exact(answer: str, label: str) -> float:
    """1 if the answer contains the label."""
    return float(label in answer)
