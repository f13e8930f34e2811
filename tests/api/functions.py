"""Functions that worker processes import by name. This module imports nothing, so that a worker starts at once."""


def parabola(x, shift):
    return {"loss": (x - 3) ** 2 + shift}


def other(x, shift):
    return {"loss": x + shift}
