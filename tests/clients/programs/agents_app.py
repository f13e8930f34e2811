"""OpenAI's Agents SDK: Responses, with or without the server's state, or Chat Completions."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

MODE = sys.argv[1]


@function_tool
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 3, "cake": 4}[item]


async def main():
    set_tracing_disabled(True)
    if MODE == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="shop", instructions="You keep a shop.", tools=[price], model="policy")
    history, last = [], None
    for question in ("Who are you?", "Say a verse.", "What do tea and cake cost?", "Thank you."):
        stored = MODE.endswith("auto_previous_response_id")
        new = [{"role": "user", "content": question}]
        state = {"auto_previous_response_id": True, "previous_response_id": last} if stored else {}
        asked = new if stored else history + new
        if "verse" in question:
            result = Runner.run_streamed(agent, asked, **state)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked, **state)
        history, last = result.to_input_list(), result.last_response_id
        print(json.dumps(result.final_output))


asyncio.run(main())
