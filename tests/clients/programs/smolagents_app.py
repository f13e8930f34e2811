"""smolagents: an agent that writes code, and one that calls tools."""

import json
import os
import sys
from contextlib import redirect_stdout

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def price(item: str) -> int:
    """What an item costs.

    Args:
        item: its name
    """
    return {"tea": 3, "cake": 4}[item]


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
settings = {"tools": [price], "model": model, "verbosity_level": LogLevel.OFF}
kind, _, streaming = sys.argv[1].removeprefix("chat, ").partition(", ")
agent = {"CodeAgent": CodeAgent, "ToolCallingAgent": ToolCallingAgent}[kind](**settings, stream_outputs=bool(streaming))
with redirect_stdout(sys.stderr):  # a stream is shown, whatever the level
    answer = agent.run("What do tea and cake cost?")
print(json.dumps(answer))
