"""The judger of the README's rollouts."""


def digits(answer: str) -> float:
    """The share of an answer's characters that are digits."""
    return sum(map(str.isdigit, answer)) / max(1, len(answer))
