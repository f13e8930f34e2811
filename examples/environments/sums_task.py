"""A task of Inspect: sums, with a calculator as a tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a + b)

    return execute


@task
def sums(count: int = 20):
    samples = [Sample(input=f"What is {n} + {3 * n}?", target=str(4 * n), id=n) for n in range(1, count + 1)]
    return Task(
        dataset=MemoryDataset(samples),
        solver=[system_message("Answer with the number."), use_tools(add()), generate()],
        scorer=[match(numeric=True), includes()],
    )
