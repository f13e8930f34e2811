"""LiteLLM: one conversation through its providers for Chat Completions, Messages and Responses."""

import json
import sys

import litellm

PRICES = {"tea": 3, "cake": 4}
FIELDS = {
    "name": "price",
    "description": "What an item costs.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
litellm.suppress_debug_info = True
MODELS = {"chat": "openai/policy", "messages": "anthropic/policy", "responses": "openai/responses/gpt-4o"}
messages = [{"role": "system", "content": "You keep a shop."}]
settings = {"model": MODELS[sys.argv[1]], "tools": [{"type": "function", "function": FIELDS}]}


def ask(*new, stream=False):
    messages.extend(new)
    answer = litellm.completion(messages=messages, stream=stream, **settings)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message


def user(text):
    return {"role": "user", "content": text}


print(json.dumps(ask(user("Who are you?")).content))
print(json.dumps(ask(user("Say a verse."), stream=True).content))
calls = ask(user("What do tea and cake cost?"), stream=True).tool_calls
items = [json.loads(call.function.arguments)["item"] for call in calls]
results = [
    {"role": "tool", "tool_call_id": call.id, "content": str(PRICES[item])}
    for call, item in zip(calls, items, strict=True)
]
print(json.dumps(ask(*results).content))
print(json.dumps(ask(user("Thank you.")).content))
