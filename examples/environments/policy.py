"""The script of a policy that adds two numbers, by a tool if it has one, and sometimes guesses instead."""

import re
from random import Random


def adder(prompt: str, random: Random) -> str:
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if last.startswith("tool"):
        return f"It is {last.removeprefix('tool').split('<|im_end|>')[0].strip()}"
    a, b = re.findall(r"\d+", last)[-2:]
    if random.random() < 0.3:
        return f"It is {random.randint(2, 99)}"
    if '"add"' in prompt:
        return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"It is {int(a) + int(b)}"
