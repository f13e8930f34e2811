"""An environment of the `verifiers` package: sums, with a calculator as a tool and a rubric of two functions."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return int(a) + int(b)


def correct(completion, answer) -> float:
    return float(answer in completion[-1]["content"].split())


def brief(completion) -> float:
    return float(len(completion[-1]["content"]) < 80)


def used_tool(completion) -> float:
    return float(any(message["role"] == "tool" for message in completion))


def load_environment(count: int = 20) -> vf.Environment:
    rows = [{"question": f"What is {n} + {3 * n}?", "answer": str(4 * n)} for n in range(1, count + 1)]
    rubric = vf.Rubric(funcs=[correct, brief, used_tool], weights=[1.0, 0.2, 0.0])
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:5]),
        tools=[add],
        max_turns=4,
        system_prompt="Answer with the number.",
        rubric=rubric,
    )
