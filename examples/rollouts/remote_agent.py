"""A third-party agent: a program that uses OpenAI's API and has a calculator. It knows nothing of Loopwright."""

import json
import os
import re
import sys
import urllib.request

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": 'Add or multiply two whole numbers, such as "17*23".',
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def ask(messages):
    """One turn of the model; base URL and key come from the environment, as for OpenAI's own SDK."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "tools": [CALCULATOR]}).encode(),
        headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def calculate(arguments):
    match = re.fullmatch(r"\s*(\d+)\s*([+*])\s*(\d+)\s*", str(json.loads(arguments).get("expression")))
    if match is None:
        return "write for example 17*23"
    a, operator, b = int(match[1]), match[2], int(match[3])
    return str(a + b if operator == "+" else a * b)


def main(task):
    messages = [{"role": "user", "content": task}]
    for _ in range(4):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return
        for call in message["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    main(sys.argv[1])
