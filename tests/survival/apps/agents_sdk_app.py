"""An app on OpenAI's Agents SDK: a clerk hands over to a cashier with tools. It uses the Responses API."""

import asyncio
import sys

from agents import Agent, ItemHelpers, Runner, function_tool, set_tracing_disabled


@function_tool
def price(item: str) -> int:
    """What an item costs."""
    return {"tea": 3, "cake": 4}[item]


async def main(task: str) -> None:
    """The cashier's answer."""
    set_tracing_disabled(True)
    cashier = Agent(name="cashier", instructions="You add up prices.", tools=[price], model="policy")
    clerk = Agent(name="clerk", instructions="You hand over to the cashier.", handoffs=[cashier], model="policy")
    running = Runner.run_streamed(clerk, task)
    pieces = 0
    async for event in running.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces += 1
    print(ItemHelpers.text_message_outputs(running.new_items))
    print(f"{pieces} pieces")


asyncio.run(main(sys.argv[1]))
