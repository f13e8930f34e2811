"""The parts of the arithmetic example: tasks, a tool, a judger, and the script of its policy."""

import re
from random import Random


def riddles() -> list[dict]:
    """Sums in words."""
    return [
        {"prompt": f"I have {a} apples and get {b} more. How many have I got?", "label": str(a + b)}
        for a in range(2, 12)
        for b in range(3, 6)
    ]


def calculator(expression: str) -> str:
    """Add or multiply two whole numbers, such as "17*23"."""
    match = re.fullmatch(r"\s*(\d+)\s*([+*])\s*(\d+)\s*", expression)
    if match is None:
        raise ValueError(f"cannot read {expression!r}; write for example 17*23")
    a, operator, b = int(match[1]), match[2], int(match[3])
    return str(a + b if operator == "+" else a * b)


def exact(answer: str, label: str) -> float:
    """1 if the last number of the answer is the label."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and numbers[-1] == label)


def policy(prompt: str, random: Random) -> str:
    """Call the calculator, then give its result; sometimes guess instead."""
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if last.startswith("tool"):
        return f"The answer is {last.removeprefix('tool').split('<|im_end|>')[0].strip()}."
    a, *rest, b = re.findall(r"\d+|[+*]", last)
    if random.random() < 0.2:
        return f"That must be {random.randint(2, 99)}."
    operator = rest[0] if rest else "+"
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}{operator}{b}"}}}}</tool_call>'
