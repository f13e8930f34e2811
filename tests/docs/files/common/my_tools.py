"""A tool that the guides name."""


def calculator(expression: str) -> str:
    """Add two whole numbers, such as "17+23"."""
    a, b = expression.split("+")
    return str(int(a) + int(b))
