"""Routes besides those of the dialects: tokens of a prompt, sessions, and what usage says about a cache."""

import aiohttp

from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.clients import send
from tests.gateway.harness import Replier, claude_of, client_of, run, serve, user

TOKEN = "a token that is long enough"


def test_tokenize_returns_the_tokens_of_a_prompt():
    async def main():
        engine = Replier()
        async with serve(engine) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            url, key = session.anthropic_base_url, session.key
            body = {"prompt": "hé", "return_token_strs": True}
            for path in ("tokenize", "v1/tokenize"):
                status, answer, _ = await send(http, "POST", f"{url}/{path}", key=key, json=body)
                assert (status, answer["count"], answer["tokens"]) == (200, 3, [*"hé".encode()])
                assert "".join(answer["token_strs"]) == "hé"
            _, prompt, _ = await send(http, "POST", f"{url}/tokenize", key=key, json={"messages": [user("hi")]})
            assert len(session.served.session.graph.nodes) == 1, "nothing is recorded"
            async with client_of(session) as client:
                counted = await client.responses.input_tokens.count(model="m", input="hi")
                await client.responses.create(model="m", input="hi")
            assert prompt["tokens"] == list(engine.calls[0][0])
            assert counted.input_tokens == prompt["count"]
            assert (await send(http, "POST", f"{url}/tokenize", key="x", json=body))[0] == 401
            assert (await send(http, "POST", f"{url}/tokenize", key=key, json={"prompt": 7}))[0] == 400

    run(main)


def test_the_owner_of_the_token_sees_all_sessions():
    async def main():
        async with serve(token=TOKEN) as gateway, aiohttp.ClientSession() as http:
            first = await gateway.open("one", SessionConfig(run="r", trial=3))
            second = await gateway.open("two")
            async with client_of(first) as client:
                await client.completions.create(model="m", prompt="a")
            await second.close()
            status, answer, _ = await send(http, "GET", f"{gateway.address}/sessions", key=TOKEN)
            assert status == 200
            one, two = answer["sessions"]
            assert (one["id"], one["run"], one["trial"], one["status"]) == ("one", "r", 3, "open")
            assert (one["turns"], one["sampled_tokens"]) == (1, 6)
            assert (two["id"], two["status"]) == ("two", "complete")
            assert first.key not in str(answer)
            for key in (None, first.key):
                assert (await send(http, "GET", f"{gateway.address}/sessions", key=key))[0] == 401
        async with serve() as gateway, aiohttp.ClientSession() as http:
            assert (await send(http, "GET", f"{gateway.address}/sessions"))[0] == 401, "without a token nobody does"

    run(main)


class Caching(Replier):
    """Has three tokens of each prompt in its cache."""

    async def generate(self, ids, sampling, *, seed):
        is_first = True
        async for chunk in super().generate(ids, sampling, seed=seed):
            yield type(chunk)(chunk.ids, chunk.logprobs, chunk.version, chunk.finish, None, 3 if is_first else 0)
            is_first = False


def test_usage_tells_cached_tokens():
    async def main():
        async with serve(Caching()) as gateway:
            session = await gateway.open()
            async with client_of(session) as client, claude_of(session) as claude:
                chat = await client.chat.completions.create(model="m", messages=[user("a")])
                assert chat.usage.prompt_tokens_details.cached_tokens == 3
                response = await client.responses.create(model="m", input="a")
                assert response.usage.input_tokens_details.cached_tokens == 3
                assert response.usage.input_tokens == chat.usage.prompt_tokens
                message = await claude.messages.create(model="m", messages=[user("a")], max_tokens=9)
                assert message.usage.cache_read_input_tokens == 3
                assert message.usage.input_tokens == chat.usage.prompt_tokens - 3, "Anthropic counts them apart"

    run(main)
