"""The judge of the TRL example."""

import re


def brief(answer: str, label: str) -> dict[str, float]:
    """1 for the right number, and up to 1 for saying little else."""
    numbers = re.findall(r"\d+", answer)
    return {"right": float(bool(numbers) and numbers[0] == label), "brief": 1 / (1 + len(answer) / 8)}
