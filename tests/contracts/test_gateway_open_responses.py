"""The compliance cases of the Open Responses specification, as tests of our own; and the tools that codex sends."""

import json

import aiohttp
import pytest

from tests.gateway.harness import Replier, call, client_of, run, serve

REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
    ),
    *("max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
}
"""What the specification requires of every response object."""
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CASES = {
    "text": {"input": [{"type": "message", "role": "user", "content": "Say hello in three words."}]},
    "system": {
        "input": [{"type": "message", "role": "system", "content": "Be a pirate."}, {"role": "user", "content": "Hi"}]
    },
    "tools": {"input": [{"type": "message", "role": "user", "content": "Weather in Paris?"}], "tools": [WEATHER]},
    "multi-turn": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
}


def says(prompt):
    return f"{call('get_weather', location='Paris')}" if "get_weather" in prompt else "Hello out there"


def check_response(response, *, status="completed"):
    """A response object as the specification requires it."""
    assert response.keys() >= REQUIRED, REQUIRED - response.keys()
    assert (response["object"], response["status"], response["error"]) == ("response", status, None)
    numbers = ("presence_penalty", "frequency_penalty", "temperature", "top_p", "top_logprobs", "created_at")
    assert all(isinstance(response[name], int | float) for name in numbers)
    assert isinstance(response["service_tier"], str)
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= tool.keys()
    for item in response["output"]:
        assert {"id", "type", "status"} <= item.keys()
        for part in item.get("content", ()):
            assert {"type", "text", "annotations", "logprobs"} <= part.keys()
    if status == "completed":
        assert isinstance(response["completed_at"], int)
        usage = response["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
        assert usage["input_tokens_details"].keys() >= {"cached_tokens"}
        assert usage["output_tokens_details"].keys() >= {"reasoning_tokens"}


async def post(session, body):
    """The status, and the response or its events."""
    headers = {"authorization": f"Bearer {session.key}"}
    url = f"{session.openai_base_url}/responses"
    async with aiohttp.ClientSession() as http, http.post(url, json={"model": "m", **body}, headers=headers) as answer:
        if not body.get("stream"):
            return answer.status, await answer.json()
        events = [block.split("\n") for block in (await answer.text()).split("\n\n") if block.startswith("event:")]
        assert [name.removeprefix("event: ") for name, _ in events] == [
            json.loads(data.removeprefix("data: "))["type"] for _, data in events
        ]
        return answer.status, [json.loads(data.removeprefix("data: ")) for _, data in events]


@pytest.mark.parametrize("case", CASES)
def test_t13_open_responses(case):
    async def main():
        async with serve(Replier(says)) as gateway:
            status, response = await post(await gateway.open(), CASES[case])
            assert status == 200
            check_response(response)
            (item,) = response["output"]
            if case == "tools":
                assert (item["type"], item["name"]) == ("function_call", "get_weather")
                assert json.loads(item["arguments"]) == {"location": "Paris"}
            else:
                assert (item["role"], item["content"][0]["text"]) == ("assistant", "Hello out there")

    run(main)


@pytest.mark.parametrize("case", CASES)
def test_t13_open_responses_streamed(case):
    async def main():
        async with serve(Replier(says)) as gateway:
            session = await gateway.open()
            status, events = await post(session, {**CASES[case], "stream": True})
            _, whole = await post(session, CASES[case])
            assert status == 200
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in (*events[:2], events[-1])] == [
                "response.created",
                "response.in_progress",
                "response.completed",
            ]
            check_response(events[0]["response"], status="in_progress")
            last = events[-1]["response"]
            check_response(last)
            kind = "function_call_arguments" if case == "tools" else "output_text"
            deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            (done,) = [event for event in events if event["type"] == f"response.{kind}.done"]
            assert "".join(deltas) == (done["arguments"] if case == "tools" else done["text"])
            added, finished = (
                [event["item"]["id"] for event in events if event["type"] == f"response.output_item.{state}"]
                for state in ("added", "done")
            )
            assert added == finished == [item["id"] for item in last["output"]]
            assert [item["type"] for item in last["output"]] == [item["type"] for item in whole["output"]]

    run(main)


def test_t13_open_responses_images_are_refused_clearly():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}]

    async def main():
        async with serve() as gateway:
            status, answer = await post(await gateway.open(), {"input": items})
            assert status == 400
            assert "images are not supported" in answer["error"]["message"]
            assert answer["error"]["param"] == "input.0.content.1"

    run(main)


def test_t13_a_response_repeats_what_was_requested():
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.5,
        "tool_choice": "none",
    }

    async def main():
        async with serve() as gateway:
            _, response = await post(await gateway.open(), {"input": "hi", **asked})
            assert {name: response[name] for name in asked} == asked

    run(main)


# -- codex ----------------------------------------------------------------------------------------------------------

CODEX_TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "Sub-agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "web_search", "external_web_access": False},
]
PATCH = '*** Begin Patch\n+say "hi"\n*** End Patch'


@pytest.mark.parametrize("stream", [False, True])
def test_t13_custom_tools_and_namespaces_are_functions_for_the_policy(stream):
    first = f"{call('apply_patch', input=PATCH)}{call('agents__spawn', task='x')}{call('shell', a=1)}"

    async def main():
        engine = Replier(lambda prompt: "done" if "<|im_start|>tool" in prompt else first)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            more = {"model": "m", "tools": CODEX_TOOLS}
            items = [{"role": "user", "content": "go"}]
            raw = await client.responses.with_raw_response.create(input=items, stream=stream, **more)
            assert raw.headers["x-loopwright-ignored"] == "tools.web_search"
            response = raw.parse()
            if stream:
                events = [event async for event in response]
                inputs = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
                assert inputs == [PATCH]
                response = events[-1].response
            patch, spawn, shell = response.output
            assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
            assert (spawn.type, spawn.namespace, spawn.name) == ("function_call", "agents", "spawn")
            assert (shell.type, shell.namespace, shell.name) == ("function_call", None, "shell")
            prompt = engine.tokenizer.decode(engine.calls[0][0])
            assert "start: patch" in prompt
            assert "web_search" not in prompt
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items.append({"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "patched"})
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"} for c in (spawn, shell)]
            again = await client.responses.create(input=items, **more)
            assert again.output_text == "done"
            assert [turn["verdict"] for turn in session.served.describe()["turns"]] == ["exact", "exact"]

    run(main)


def test_t13_a_custom_call_that_breaks_off_is_incomplete():
    broken = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Beg'

    async def main():
        async with serve(Replier(broken)) as gateway:
            body = {"input": "go", "tools": CODEX_TOOLS, "max_output_tokens": 60}
            _, response = await post(await gateway.open(), body)
            statuses = [item["status"] for item in response["output"] if item["type"] == "custom_tool_call"]
            assert statuses in ([], ["incomplete"])

    run(main)


def test_t13_a_client_s_name_for_a_branch_is_recorded():
    async def main():
        async with serve() as gateway, client_of(session := await gateway.open()) as client:
            for headers in ({"thread-id": "child"}, {"x-loopwright-branch": "mine", "thread-id": "child"}, {}):
                await client.responses.create(model="m", input="hi", extra_headers=headers)
            assert [turn["branch"] for turn in session.served.describe()["turns"]] == ["child", "mine", ""]

    run(main)
