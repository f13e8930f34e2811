"""Scripts of policies that add two numbers, by a tool if they have one."""

import re
from random import Random


def calculator(prompt: str, random: Random) -> str:  # noqa: ARG001  a script gets both
    """Always right."""
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if last.startswith("tool"):
        return f"It is {last.removeprefix('tool').split('<|im_end|>')[0].strip()}"
    a, b = re.findall(r"\d+", last)[-2:]
    if '"add"' in prompt:
        return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"It is {int(a) + int(b)}"


def adder(prompt: str, random: Random) -> str:
    """Sometimes guesses instead."""
    return f"It is {random.randint(2, 99)}" if random.random() < 0.3 else calculator(prompt, random)
