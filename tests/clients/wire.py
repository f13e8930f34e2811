"""What a client received, read from the bytes of each dialect without the gateway's code."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.clients.tap import Exchange

DIALECTS = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}


@dataclass
class Answer:
    """One turn of the policy, as the client saw it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and arguments of each tool call."""


def dialect_of(exchange: Exchange) -> str | None:
    """The dialect, if the request asked for a turn."""
    path = exchange.path.partition("?")[0]
    found = [name for end, name in DIALECTS.items() if path.endswith(end)]
    return found[0] if found and exchange.method == "POST" else None


def events(exchange: Exchange) -> Iterator[dict[str, Any]]:
    """The data of the events of a stream; comments and the end mark are left out."""
    for block in exchange.response.decode().split("\n\n"):
        data = "\n".join(line[5:].lstrip() for line in block.splitlines() if line.startswith("data:"))
        if data and data != "[DONE]":
            yield json.loads(data)


def answer_of(exchange: Exchange) -> Answer:
    """The turn that an exchange delivered."""
    read = {
        ("chat", False): lambda: _chat(json.loads(exchange.response)["choices"][0]["message"]),
        ("chat", True): lambda: _chat_stream(list(events(exchange))),
        ("responses", False): lambda: _items(json.loads(exchange.response)["output"]),
        ("responses", True): lambda: _responses_stream(list(events(exchange))),
        ("messages", False): lambda: _blocks(json.loads(exchange.response)["content"]),
        ("messages", True): lambda: _messages_stream(list(events(exchange))),
    }
    return read[dialect_of(exchange), exchange.streamed]()


def _chat(message: dict[str, Any]) -> Answer:
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    arguments = [(each["name"], json.loads(each["arguments"])) for each in calls]
    return Answer(message.get("content") or "", message.get("reasoning_content") or "", arguments)


def _chat_stream(chunks: list[dict[str, Any]]) -> Answer:
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, str]] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name in message:
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or ():
            function = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            for name, text in part["function"].items():
                function[name] += text or ""
    return _chat({**message, "tool_calls": [{"function": calls[index]} for index in sorted(calls)]})


def _items(items: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for item in items:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "custom_tool_call":
            answer.calls.append((item["name"], {"input": item["input"]}))
        elif item["type"] == "reasoning":
            answer.reasoning += "".join(part["text"] for part in item["content"])
        else:
            answer.text += "".join(part["text"] for part in item["content"])
    return answer


def _responses_stream(stream: list[dict[str, Any]]) -> Answer:
    """From the deltas; the items of the last event must say the same."""
    answer = Answer()
    kinds = {"response.output_text.delta": "text", "response.reasoning_text.delta": "reasoning"}
    arguments: dict[str, str] = {}
    names: dict[str, str] = {}
    custom: set[str] = set()
    for event in stream:
        if name := kinds.get(event["type"]):
            setattr(answer, name, getattr(answer, name) + event["delta"])
        elif event["type"] == "response.output_item.added" and "name" in event["item"]:
            names[event["item"]["id"]] = event["item"]["name"]
        elif event["type"] in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
            arguments[event["item_id"]] = arguments.get(event["item_id"], "") + event["delta"]
            custom |= {event["item_id"]} if "custom" in event["type"] else set()
    answer.calls = [
        (names[id], {"input": text} if id in custom else json.loads(text)) for id, text in arguments.items()
    ]
    assert stream[-1]["type"] == "response.completed", stream[-1]["type"]
    assert answer == _items(stream[-1]["response"]["output"]), "the stream's last event differs from its deltas"
    return answer


def _blocks(blocks: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for block in blocks:
        if block["type"] == "tool_use":
            answer.calls.append((block["name"], block["input"]))
        elif block["type"] == "thinking":
            answer.reasoning += block["thinking"]
        else:
            answer.text += block["text"]
    return answer


def _messages_stream(stream: list[dict[str, Any]]) -> Answer:
    blocks: dict[int, dict[str, Any]] = {}
    for event in stream:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name in ("text", "thinking"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
    assert stream[-1]["type"] == "message_stop", stream[-1]
    ordered = [blocks[index] for index in sorted(blocks)]
    return _blocks([{**block, "input": json.loads(block["json"] or "{}")} for block in ordered])
