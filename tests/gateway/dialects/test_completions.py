"""OpenAI completions: several prompts in a request, and prompts that are echoed."""

import openai
import pytest

from tests.gateway.harness import Replier, client_of, run, serve


def numbered(prompt):
    return f"<{prompt}>"


def test_several_prompts_have_their_choices_in_order():
    async def main():
        engine = Replier(numbered)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            answer = await client.completions.create(model="m", prompt=["a", "bc"], n=2)
            assert [choice.text for choice in answer.choices] == ["<a>", "<a>", "<bc>", "<bc>"]
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            assert answer.usage.prompt_tokens == 1 + 2, "choices share their prompt"
            assert answer.usage.completion_tokens == 4 + 4 + 5 + 5
            ids = await client.completions.create(model="m", prompt=[[100], [101]])
            assert [choice.text for choice in ids.choices] == ["<d>", "<e>"]
            chunks = [c async for c in await client.completions.create(model="m", prompt=["x", "y"], stream=True)]
            texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in (0, 1)]
            assert texts == ["<x>", "<y>"]
            assert sum(sum(row["response_mask"]) for row in session.served.describe()["rows"]) == 18 + 8 + 8

    run(main)


def test_the_prompt_is_echoed():
    async def main():
        async with serve(Replier(numbered)) as gateway, client_of(await gateway.open()) as client:
            more = {"model": "m", "prompt": ["a", [98]], "echo": True}
            answer = await client.completions.create(**more)
            assert [choice.text for choice in answer.choices] == ["a<a>", "b<b>"]
            chunks = [chunk async for chunk in await client.completions.create(**more, stream=True)]
            texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in (0, 1)]
            assert texts == ["a<a>", "b<b>"]

    run(main)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": ["a", [999]]}, "prompt"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_what_cannot_be_continued_is_refused(wrong, param):
    async def main():
        async with serve() as gateway, client_of(await gateway.open()) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(**{"model": "m", "prompt": "a", **wrong})
            assert refused.value.param == param

    run(main)
