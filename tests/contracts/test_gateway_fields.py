"""Contract T13 of the gateway: each field is honoured, refused by name, or ignored, recorded and named."""

import aiohttp
import openai
import pytest

from loopwright.engines.base import GUIDES, PENALTIES, Guide, Sampling
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.dialects.chat import ChatCompletions
from loopwright.gateway.dialects.completions import Completions
from loopwright.gateway.dialects.messages import Messages
from loopwright.gateway.dialects.responses import Responses
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.harness import Replier, claude_of, client_of, run, serve, user

BODIES = {
    "v1/chat/completions": {"messages": [user("hi")]},
    "v1/completions": {"prompt": "hi"},
    "v1/responses": {"input": "hi"},
    "v1/messages": {"messages": [user("hi")], "max_tokens": 64},
}
REFUSED = {
    "v1/chat/completions": {"min_tokens": 3, "modalities": ["audio"], "chat_template": "x", "ignore_eos": True},
    "v1/completions": {"suffix": "x", "best_of": 3, "prompt_logprobs": 2, "continue_final_message": True},
    "v1/responses": {
        "background": True,
        "prompt": {"id": "p"},
        "bad_words": ["x"],
        "n": 2,
        "continue_final_message": True,
    },
    "v1/messages": {"mcp_servers": [{"url": "x"}], "container": "c", "compaction": {"type": "summarize"}, "stop": "x"},
}
EVERYWHERE = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"65": 5},
    "guided_json": {"type": "object"},
    "grammar": 'root ::= "a"',
    "structured_outputs": {"regex": "a+"},
    "chat_template_kwargs": {"enable_thinking": False},
}
"""What changes prompt or sampling, and the plain engine of these tests cannot do."""
NEUTRAL = (None, 0, {}, [])
FLAGS = ("stream", "return_token_ids", "parallel_tool_calls")


class Steerable(Replier):
    """An engine that takes all parameters."""

    steering = PENALTIES | GUIDES


async def post(session, path, body):
    headers = {"authorization": f"Bearer {session.key}"}
    url = f"{session.anthropic_base_url}/{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        return response.status, response.headers.get("x-loopwright-ignored"), await response.json()


@pytest.mark.parametrize("path", BODIES)
def test_t13_what_cannot_be_honoured_is_refused_by_name(path):
    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            for name, value in {**EVERYWHERE, **REFUSED[path]}.items():
                status, _, answer = await post(session, path, {**BODIES[path], name: value})
                assert status == 400, name
                assert name in answer["error"]["message"]
            assert len(session.served.session.graph.nodes) == 1, "a refused request leaves nothing behind"

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_t13_neutral_values_pass_and_are_not_named(path):
    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            for value in NEUTRAL:
                neutral = dict.fromkeys([*EVERYWHERE, *REFUSED[path], *FLAGS, "anything"], value)
                status, ignored, answer = await post(session, path, {**BODIES[path], **neutral, "top_k": -1})
                assert (status, ignored) == (200, None), answer

    run(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_t13_unknown_fields_are_recorded_and_named(path, stream, tmp_path):
    async def main():
        unknown = {"from_the_future": {"a": [1]}, "wei\r\nrd": "x" * 5000}
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open("s")
            headers = {"authorization": f"Bearer {session.key}"}
            url = f"{session.anthropic_base_url}/{path}"
            body = {**BODIES[path], **unknown, "stream": stream, "metadata": {"a": "b"}}
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
                assert response.headers["x-loopwright-ignored"] == "from_the_future, wei%0D%0Ard"
                await response.read()
            recorded = {"from_the_future": {"a": [1]}, "wei\r\nrd": "not recorded: 5002 bytes"}
            assert session.served.describe()["turns"][0]["ignored"] == recorded
        async with serve(output=tmp_path) as gateway:
            (turn,) = gateway.find("s").describe()["turns"]
            assert turn["ignored"] == recorded, "also after a restart"

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_t13_sampling_fields_reach_the_engine_and_the_record(path):
    async def main():
        engine = Steerable()
        async with serve(engine) as gateway:
            session = await gateway.open()
            fields = {name: EVERYWHERE[name] for name in PENALTIES}
            status, ignored, answer = await post(session, path, {**BODIES[path], **fields})
            assert (status, ignored) == (200, None), answer
            sampling = engine.calls[0][2]
            assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, 0.5)
            assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((65, 5.0),))
            for name, kind in (("guided_json", "json"), ("grammar", "grammar")):
                status, *_ = await post(session, path, {**BODIES[path], name: EVERYWHERE[name]})
                assert status == 200
                assert engine.calls[-1][2].guide.kind == kind
            nodes = [node for node in session.episode().nodes if node.spans]
            assert nodes[0].sampling["frequency_penalty"] == 0.5
            assert nodes[0].sampling["logit_bias"] == {"65": 5.0}
            assert nodes[1].sampling["guide"]["kind"] == "json"
            assert session.served.describe()["rows"] == [], "no trainer computes the logprobs of these turns"

    run(main)


def test_t13_a_steered_turn_is_context_for_the_turns_that_are_trained():
    async def main():
        async with serve(Steerable()) as gateway, client_of(session := await gateway.open()) as client:
            history = [user("hi")]
            for penalty in (0.5, 0):
                answer = await client.chat.completions.create(model="m", messages=history, presence_penalty=penalty)
                history += [answer.choices[0].message, user("more")]
            (row,) = session.served.describe()["rows"]
            assert sum(row["response_mask"]) == len(b"hello") + 1, "only the second turn"

    run(main)


def test_t13_a_bad_bias_or_guide_is_refused_by_name():
    async def main():
        async with serve(Steerable()) as gateway:
            session = await gateway.open()
            bad = [
                ("logit_bias", {"258": 1}),
                ("logit_bias", {"x": 1}),
                ("logit_bias", {"65": 101}),
                ("logit_bias", [1]),
                ("guided_json", "{"),
                ("guided_choice", "a"),
                ("guided_regex", 7),
                ("frequency_penalty", 3),
                ("repetition_penalty", -1),
                ("structured_outputs", {"structural_tag": "x"}),
                ("chat_template_kwargs", [1]),
            ]
            for name, value in bad:
                status, _, answer = await post(session, "v1/chat/completions", {"messages": [user("a")], name: value})
                assert (status, name in answer["error"]["message"]) == (400, True), (name, answer)
            two = {"guided_json": {"type": "object"}, "guided_regex": "a"}
            status, _, answer = await post(session, "v1/completions", {"prompt": "a", **two})
            assert (status, answer["error"]["param"]) == (400, "guided_regex")

    run(main)


def test_t13_pinned_sampling_is_named():
    async def main():
        engine = Replier()
        async with serve(engine) as gateway:
            session = await gateway.open("s", SessionConfig(sampling=Sampling(temperature=1.0)))
            body = {"messages": [user("a")], "temperature": 0.2, "top_p": 0.5}
            assert (await post(session, "v1/chat/completions", body))[:2] == (200, "temperature")
            assert (engine.calls[0][2].temperature, engine.calls[0][2].top_p) == (1.0, 0.5)

    run(main)


def test_t13_options_of_known_fields_are_named():
    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            options = {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "truncation": "disabled"}
            assert (await post(session, "v1/responses", {"input": "a", **options}))[1] == "reasoning, text.verbosity"
            edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
            body = {**BODIES["v1/messages"], "thinking": {"type": "disabled"}}
            for some, named in ((edits[:1], None), (edits, "context_management.clear_tool_uses_20250919")):
                status, ignored, _ = await post(session, "v1/messages", {**body, "context_management": {"edits": some}})
                assert (status, ignored) == (200, named)

    run(main)


class Templated(ByteTokenizer):
    """Has a chat template with an argument."""

    chat_template = ChatTemplateSource(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening | default('') }}{% endif %}"
    )


def test_t13_arguments_reach_the_chat_template():
    async def main():
        engine = Replier("hello")
        engine.tokenizer = Templated()
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            for more in ({}, {"chat_template_kwargs": {"opening": "he"}}):
                await client.chat.completions.create(model="m", messages=[user("a")], extra_body=more)
            without, with_it = (engine.tokenizer.decode(ids) for ids, *_ in engine.calls)
            assert with_it == f"{without}he"
            assert all(turn["verdict"] != "broken" for turn in session.served.describe()["turns"])

    run(main)


def test_t13_fields_of_messages_are_named():
    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            named = {**user("hi"), "name": "Ada", "annotations": [], "audio": None, "future": {"a": 1}}
            status, ignored, _ = await post(session, "v1/chat/completions", {"messages": [user("a"), named]})
            assert (status, ignored) == (200, "messages.future, messages.name")
            (turn,) = session.served.describe()["turns"]
            assert turn["ignored"] == {"messages.future": {"a": 1}, "messages.name": "Ada"}

    run(main)


def test_t13_fields_of_earlier_messages_are_named_again():
    """Also if another conversation of the session, which has none, comes in between."""

    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            conversations = {"messages.name": [{**user("a"), "name": "Ada"}], None: [user("b")]}
            for turn in range(4):
                for name, messages in conversations.items():
                    status, ignored, body = await post(session, "v1/chat/completions", {"messages": messages})
                    assert (status, ignored) == (200, name), f"turn {turn}"
                    answer = {"role": "assistant", "content": body["choices"][0]["message"]["content"]}
                    messages += [answer, user(f"{turn}")]

    run(main)


FUNCTION = {"name": "add", "description": "Adds.", "strict": True, "future": 1}
SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("v1/chat/completions", {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}),
        ("v1/responses", {"type": "function", **FUNCTION, "parameters": SCHEMA}),
        ("v1/responses", {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}),
        ("v1/messages", {**FUNCTION, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}),
    ],
)
def test_t13_fields_of_tools_are_named(path, tool):
    """Given a schema that no engine here enforces, its client is told."""

    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            status, ignored, _ = await post(session, path, {**BODIES[path], "tools": [tool]})
            assert (status, {*(ignored or "").split(", ")}) == (200, {"tools.strict", "tools.future"})
            (turn,) = session.served.describe()["turns"]
            assert turn["ignored"] == {"tools.strict": True, "tools.future": 1}
            plain = {name: value for name, value in tool.items() if name not in ("strict", "future")}
            if path == "v1/chat/completions":
                plain["function"] = {"name": "add", "strict": False, "parameters": SCHEMA}
            if plain.get("type") != "namespace":
                assert (await post(session, path, {**BODIES[path], "tools": [plain]}))[:2] == (200, None)

    run(main)


def test_t13_what_cannot_be_included_is_named_and_malformed_options_are_refused():
    async def main():
        async with serve() as gateway:
            session, path = await gateway.open(), "v1/responses"
            known = ["reasoning.encrypted_content", "message.output_text.logprobs"]
            assert (await post(session, path, {"input": "a", "include": known}))[:2] == (200, None)
            status, ignored, _ = await post(session, path, {"input": "a", "include": [*known, "file_search", {"a": 1}]})
            assert (status, ignored) == (200, "include")
            assert session.served.describe()["turns"][-1]["ignored"] == {"include": ["file_search", {"a": 1}]}
            for broken in ({"include": "file_search"}, {"text": "json"}):
                status, _, answer = await post(session, path, {"input": "a", **broken})
                assert (status, answer["error"]["param"]) == (400, next(iter(broken)))

    run(main)


def test_t13_a_response_repeats_only_the_limit_that_was_requested():
    async def main():
        async with serve() as gateway:
            session = await gateway.open()
            for sent, repeated in (({}, None), ({"max_output_tokens": 7}, 7)):
                _, _, answer = await post(session, "v1/responses", {"input": "a", **sent})
                assert answer["max_output_tokens"] == repeated

    run(main)


def test_t13_top_logprobs_without_logprobs_are_named():
    async def main():
        async with serve() as gateway:
            session, body = await gateway.open(), BODIES["v1/chat/completions"]
            assert (await post(session, "v1/chat/completions", {**body, "top_logprobs": 2}))[1] == "top_logprobs"
            both = {**body, "top_logprobs": 2, "logprobs": True}
            assert (await post(session, "v1/chat/completions", both))[1] is None

    run(main)


def test_t13_continue_final_message_continues_it():
    async def main():
        engine = Replier("hello")
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            messages = [user("hi"), {"role": "assistant", "content": "hel"}]
            more = {"continue_final_message": True, "add_generation_prompt": False}
            answer = await client.chat.completions.create(model="m", messages=messages, extra_body=more)
            assert answer.choices[0].message.content == "lo"
            (row,) = session.served.describe()["rows"]
            assert sum(row["response_mask"]) == len(b"lo") + 1, "what was given is not trained on"
            for bad, name in (
                ({"messages": [user("a")], "continue_final_message": True}, "continue_final_message"),
                ({"messages": [user("a")], "add_generation_prompt": False}, "add_generation_prompt"),
            ):
                status, _, refusal = await post(session, "v1/chat/completions", bad)
                assert (status, refusal["error"]["param"]) == (400, name)

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_t13_token_ids_for_those_who_ask(stream):
    async def main():
        engine = Replier("hé")
        async with serve(engine) as gateway:
            session = await gateway.open()
            more = {"model": "m", "extra_body": {"return_token_ids": True}, "stream": stream}
            async with client_of(session) as client, claude_of(session) as claude:
                chat = await client.chat.completions.create(messages=[user("a")], **more)
                text = await client.completions.create(prompt="a", **more)
                response = await client.responses.create(input="a", **more)
                message = await claude.messages.create(messages=[user("a")], max_tokens=9, **more)
                if not stream:
                    prompts = [chat.prompt_token_ids, text.choices[0].prompt_token_ids]
                    ids = [chat.choices[0].token_ids, text.choices[0].token_ids]
                    last = [response, message]
                else:
                    chats, texts = [e async for e in chat], [e async for e in text]
                    prompts = [chats[0].prompt_token_ids, texts[0].choices[0].prompt_token_ids]
                    ids = [
                        [t for e in events for c in e.choices for t in getattr(c, "token_ids", ())]
                        for events in (chats, texts)
                    ]
                    last = [[e async for e in response][-1].response, [e async for e in message][-2]]
            prompts += [each.prompt_token_ids for each in last]
            ids += [each.token_ids for each in last]
            assert prompts == [list(given) for given, *_ in engine.calls]
            assert ids == [sampled for _, sampled, *_ in engine.calls]
            assert [each.token_logprobs for each in last] == [[-0.5] * 4] * 2

    run(main)


def test_t13_no_field_of_the_sdks_is_forgotten():
    """Each parameter of the official SDKs is in a table, or known to be ignored and named."""
    from anthropic.types.beta import message_create_params as messages
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    ignored = {
        ChatCompletions: {"moderation", "reasoning_effort", "verbosity", "web_search_options"},
        Completions: set(),
        Responses: {"access_programs", "context_management", "image", "moderation", "reasoning", "truncation"},
        Messages: set(),
    }
    bases = {
        ChatCompletions: chat.CompletionCreateParamsBase,
        Completions: completions.CompletionCreateParamsBase,
        Responses: responses.ResponseCreateParamsBase,
        Messages: messages.MessageCreateParamsBase,
    }
    for dialect, base in bases.items():
        known = dialect.known_fields
        assert known.honoured.isdisjoint(known.no_effect)
        tables = known.honoured | known.no_effect | set(known.refused)
        assert set(base.__annotations__) - tables == ignored[dialect], dialect.__name__


def test_t13_a_guided_turn_is_not_continued_in_the_middle():
    guided = Sampling(guide=Guide(kind="regex", value="a+", source="guided_regex"))
    with pytest.raises(ValueError, match="send it again"):
        guided.after(3)
    assert Sampling(presence_penalty=1, max_tokens=9).after(3).sampled_before == 3
    assert Sampling(max_tokens=9).after(3) == Sampling(max_tokens=6)


def test_t13_the_sdk_raises_for_what_is_refused():
    async def main():
        async with serve() as gateway, client_of(await gateway.open()) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[user("a")], logit_bias={"65": 1})
            assert refused.value.param == "logit_bias"

    run(main)
