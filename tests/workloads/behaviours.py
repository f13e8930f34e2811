"""What trials of the workload contract do, as Python functions."""

BEHAVIOURS = """
import os, time


def measure(value):
    with open("seen", "wb") as file:
        file.write(value.encode())
    return {"length": len(value)}


def crash(value):
    raise RuntimeError("broken on purpose")


def hang(value):
    with open("pid", "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(1000)


def forget(value):
    return {"width": 1}
"""
