"""Pydantic AI with each of its clients for our dialects."""

import asyncio
import json
import sys

from pydantic_ai import Agent

MODELS = {"chat": "openai-chat:policy", "responses": "openai-responses:policy", "messages": "anthropic:policy"}
dialect, _, state = sys.argv[1].partition(", ")
agent = Agent(MODELS[dialect], instructions="You keep a shop.", model_settings={state: "auto"} if state else None)


@agent.tool_plain
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 3, "cake": 4}[item]


async def main():
    history = []
    for question in ("Who are you?", "Say a verse.", "What do tea and cake cost?", "Thank you."):
        if "verse" in question:
            async with agent.run_stream(question, message_history=history) as result:
                text = await result.get_output()
        else:
            result = await agent.run(question, message_history=history)
            text = result.output
        history = result.all_messages()
        print(json.dumps(text))


asyncio.run(main())
