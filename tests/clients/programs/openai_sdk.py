"""OpenAI's SDK: a conversation with tools in Chat Completions, or in Responses with or without its state."""

import json
import sys

from openai import OpenAI

FIELDS = {
    "name": "price",
    "description": "What an item costs.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
PRICES = {"tea": 3, "cake": 4}
client = OpenAI()


def chat():
    messages = [{"role": "system", "content": "You keep a shop."}]
    settings = {"model": "policy", "tools": [{"type": "function", "function": FIELDS}], "messages": messages}

    def ask(question, **more):
        messages.append({"role": "user", "content": question})
        return client.chat.completions.create(**settings, **more)

    def keep(message):
        messages.append(message.model_dump(exclude_none=True))
        return message

    print(json.dumps(keep(ask("Who are you?").choices[0].message).content))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask("Say a verse.", stream=True) if chunk.choices)
    messages.append({"role": "assistant", "content": text})
    print(json.dumps(text))
    messages.append({"role": "user", "content": "What do tea and cake cost?"})
    with client.chat.completions.stream(**settings) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    calls = [call.model_dump(exclude={"index": True, "function": {"parsed_arguments"}}) for call in message.tool_calls]
    messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
    for call in message.tool_calls:
        result = str(PRICES[json.loads(call.function.arguments)["item"]])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(json.dumps(keep(client.chat.completions.create(**settings).choices[0].message).content))
    print(json.dumps(ask("Thank you.").choices[0].message.content))


def responses(stateful=False):
    items, last = [], None
    settings = {"model": "policy", "instructions": "You keep a shop.", "tools": [{"type": "function", **FIELDS}]}

    def ask(new, stream=False):
        nonlocal items, last
        request = {**settings, "input": new} if stateful and last else {**settings, "input": items + new}
        if stateful and last:
            request["previous_response_id"] = last
        if stream:
            with client.responses.stream(**request) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(**request)
        items += [*new, *(item.model_dump(exclude_none=True, exclude={"status"}) for item in response.output)]
        last = response.id
        return response

    def user(text):
        return [{"role": "user", "content": text}]

    print(json.dumps(ask(user("Who are you?")).output_text))
    print(json.dumps(ask(user("Say a verse."), stream=True).output_text))
    calls = [
        item for item in ask(user("What do tea and cake cost?"), stream=True).output if item.type == "function_call"
    ]
    results = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(PRICES[json.loads(call.arguments)["item"]]),
        }
        for call in calls
    ]
    print(json.dumps(ask(results).output_text))
    print(json.dumps(ask(user("Thank you.")).output_text))


{"chat": chat, "responses": responses, "responses, stored": lambda: responses(stateful=True)}[sys.argv[1]]()
