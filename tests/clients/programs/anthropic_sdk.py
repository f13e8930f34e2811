"""Anthropic's SDK: `messages` by hand, or the tool runner, which leaves the history to the server by default."""

import json
import sys

from anthropic import Anthropic, beta_tool

PRICES = {"tea": 3, "cake": 4}
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = {"name": "price", "description": "What an item costs.", "input_schema": SCHEMA}
client = Anthropic()


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def by_hand():
    messages = []
    settings = {"model": "policy", "max_tokens": 1000, "system": "You keep a shop.", "tools": [TOOL]}

    def ask(content, stream=False):
        messages.append({"role": "user", "content": content})
        if stream:
            with client.messages.stream(messages=messages, **settings) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **settings)
        messages.append({"role": "assistant", "content": answer.content})
        return answer

    print(json.dumps(text_of(ask("Who are you?"))))
    print(json.dumps(text_of(ask("Say a verse.", stream=True))))
    calls = [block for block in ask("What do tea and cake cost?", stream=True).content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(PRICES[call.input["item"]])} for call in calls
    ]
    print(json.dumps(text_of(ask(results))))
    print(json.dumps(text_of(ask("Thank you."))))


@beta_tool
def price(item: str) -> str:
    """What an item costs."""
    return str(PRICES[item])


def runner():
    question = {"role": "user", "content": "What do tea and cake cost?"}
    settings = {"model": "policy", "max_tokens": 1000, "system": "You keep a shop.", "tools": [price]}
    print(json.dumps(text_of(client.beta.messages.tool_runner(messages=[question], **settings).until_done())))


{"messages": by_hand, "messages, tool_runner": runner}[sys.argv[1]]()
