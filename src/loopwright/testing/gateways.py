"""What every home of a gateway promises, as tests.

    class TestMine(GatewayContract):
        def make_home(self, home: Path) -> GatewayHost:
            return MyHome(...)

Its engine answers whatever it likes, in a few tokens.
"""
# ruff: noqa: S101  These are tests, wherever they stand.

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Chunk, Engine, Sampling
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayClient
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.rollouts.remote.gateway_host import AgentSession, GatewayHost
from loopwright.testing.engines import ids_of, logprobs_of

T = TypeVar("T")
_LONGEST_S = 90.0


async def asked(url: str, body: Mapping[str, Any], key: str) -> tuple[int, bytes]:
    """Have an agent ask for something: status and body of what it is answered."""
    import aiohttp

    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as client,
        client.post(url, json={"model": "any", **body}) as response,
    ):
        return response.status, await response.read()


async def said(
    session: AgentSession, text: str = "hello", *, key: str | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Have an agent of this session say something: status and body of what it is answered."""
    body = {"messages": [{"role": "user", "content": text}], **more}
    status, answer = await asked(f"{session.openai_base_url}/chat/completions", body, key or session.key)
    return status, orjson.loads(answer)


async def streamed(url: str, body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    status, answer = await asked(url, {**body, "stream": True}, key)
    assert status == 200, answer
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


_SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


async def _whole(session: AgentSession, text: str) -> list[dict[str, Any]]:
    """What is told of each token of an answer."""
    _, answer = await said(session, text, **_SCORED)
    entries: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return entries


async def _in_parts(session: AgentSession, text: str) -> list[dict[str, Any]]:
    """The same of an answer that is streamed."""
    body = {"messages": [{"role": "user", "content": text}], **_SCORED}
    chunks = await streamed(f"{session.openai_base_url}/chat/completions", body, session.key)
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    return [entry for logprobs in told for entry in logprobs["content"]]


async def _as_anthropic(session: AgentSession, text: str) -> str:
    """The text of an answer that is streamed in the other dialect."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6}
    events = await streamed(f"{session.anthropic_base_url}/v1/messages", body, session.key)
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def _tokens(episode: Episode, place: int) -> tuple[list[int], tuple[int, ...], tuple[float, ...]]:
    """What the engine was given before a turn, and the ids and logprobs that it gave."""
    ids = [token for index in episode.path(place) for token in episode.nodes[index].ids]
    count = episode.nodes[place].sampled
    return ids[:-count], tuple(ids[-count:]), episode.nodes[place].logprobs[-count:]


async def _sampled(engine: Engine, episode: Episode, place: int) -> list[Chunk]:
    """A turn once more: nothing was captured but what the engine samples there."""
    given, ids, logprobs = _tokens(episode, place)
    sampling = Sampling(max_tokens=6, top_logprobs=2)
    chunks = [chunk async for chunk in engine.generate(given, sampling, seed=f"s:{place}")]
    assert (ids_of(chunks), logprobs_of(chunks)) == (ids, logprobs)
    return chunks


class GatewayContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a home."""

    @abstractmethod
    def make_home(self, home: Path) -> GatewayHost:
        """The home that is tested, not yet started."""

    def make_engine(self, home: Path) -> Engine | None:
        """The engine that it serves, once more: what that samples is what has to be captured. None if there is none."""
        return None

    def around(self, home: Path) -> AbstractAsyncContextManager[Any]:
        """What has to be there for it, such as a gateway elsewhere."""
        return nullcontext()

    def use(self, home: Path, story: Callable[[GatewayHost], Awaitable[T]]) -> T:
        """Run `story` with the home in an event loop, and close it."""

        async def main() -> T:
            async with self.around(home), aclosing(self.make_home(home)) as made:
                await made.start()
                return await asyncio.wait_for(story(made), _LONGEST_S)

        return asyncio.run(main())

    def test_a_session_becomes_an_episode(self, tmp_path: Path) -> None:
        """With the ids, logprobs and version of each token; and then takes no more calls."""

        async def story(home: GatewayHost) -> None:
            session = await home.open("trial-1", SessionConfig(run="r", trial=1, sampling=Sampling(max_tokens=5)))
            assert session.id == "trial-1"
            assert session.openai_base_url.endswith("/trial-1/v1")
            assert session.anthropic_base_url.endswith("/trial-1")
            status, answer = await said(session)
            assert status == 200
            captured = await session.complete()
            episode = captured.episode
            assert (episode.turns, captured.broken, captured.silent_s) == (1, "", 0.0)
            assert episode.sampled == answer["usage"]["completion_tokens"] <= 5
            assert episode.answer == (answer["choices"][0]["message"]["content"] or "")
            assert "generate" in episode.attempts[-1].phases_s
            status, refusal = await said(session)
            assert status == 409, "a call after the session was closed"
            assert "closed" in str(refusal) or "complete" in str(refusal)
            assert (await session.close()).nodes == episode.nodes, "to close it twice changes nothing"

        self.use(tmp_path, story)

    def test_what_is_sampled_is_told_and_captured_token_by_token(self, tmp_path: Path) -> None:
        """Whole and as a stream, in both dialects: the engine's own ids, logprobs and alternatives."""

        async def story(home: GatewayHost) -> None:
            session = await home.open("trial-5", SessionConfig(seed="s", sampling=Sampling(max_tokens=6)))
            told = [await _whole(session, "a"), await _in_parts(session, "b")]
            text = await _as_anthropic(session, "c")
            episode = await session.close()
            places = [index for index, node in enumerate(episode.nodes) if node.spans]
            for place, entries in zip(places, told, strict=False):
                assert tuple(entry["logprob"] for entry in entries) == _tokens(episode, place)[2]
            assert text == episode.nodes[places[2]].message["content"]
            if (engine := self.make_engine(tmp_path)) is not None:
                chunks = [await _sampled(engine, episode, place) for place in places]
                for entries, sampled in zip(told, chunks, strict=False):
                    likeliest = [[value for _, value in tops] for chunk in sampled for tops in chunk.tops or ()]
                    assert [[each["logprob"] for each in entry["top_logprobs"]] for entry in entries] == likeliest
                await engine.close()

        self.use(tmp_path, story)

    def test_ids_that_are_no_tokens_are_refused(self, tmp_path: Path) -> None:
        """As the request's own fault: the session goes on, and so does every other."""

        async def story(home: GatewayHost) -> None:
            session = await home.open("trial-6", SessionConfig(sampling=Sampling(max_tokens=4)))
            status, answer = await asked(
                f"{session.openai_base_url}/completions", {"prompt": [2_000_000_000]}, session.key
            )
            assert (status, orjson.loads(answer)["error"]["type"]) == (400, "invalid_request_error"), answer
            assert (await said(session))[0] == 200
            assert (await session.complete()).broken == ""

        self.use(tmp_path, story)

    def test_the_same_id_is_the_same_session(self, tmp_path: Path) -> None:
        """For the same run and trial; another trial's is refused."""

        async def story(home: GatewayHost) -> None:
            first = await home.open("trial-2", SessionConfig(run="r", trial=2))
            again = await home.open("trial-2", SessionConfig(run="r", trial=2))
            assert (first.id, first.key) == (again.id, again.key)
            with pytest.raises(Refusal, match="belongs to another run or trial"):
                await home.open("trial-2", SessionConfig(run="r", trial=3))
            other = await home.open()
            assert other.id != first.id
            assert other.key != first.key

        self.use(tmp_path, story)

    def test_a_wrong_key_is_refused(self, tmp_path: Path) -> None:
        """Another session's, and the lack of the gateway's own."""

        async def story(home: GatewayHost) -> None:
            mine, other = await home.open("a"), await home.open("b")
            assert (await said(mine, key=other.key))[0] == 401
            assert (await said(mine))[0] == 200
            access = await home.access()
            async with GatewayClient(access.url, "no-such-token-at-all") as stranger:
                with pytest.raises(Refusal, match="token"):
                    await stranger.open()
                with pytest.raises(Refusal, match="token"):
                    await stranger.publish(WeightUpdate(7))

        self.use(tmp_path, story)

    def test_a_session_can_be_forgotten(self, tmp_path: Path) -> None:
        """With all that was recorded of it."""

        async def story(home: GatewayHost) -> None:
            session = await home.open("gone")
            await session.delete()
            await session.delete()
            with pytest.raises(Refusal, match="no session"):
                await session.describe()
            assert (await said(session))[0] == 404

        self.use(tmp_path, story)

    def test_news_of_the_policy_reach_its_engine(self, tmp_path: Path) -> None:
        """Each token says which version sampled it."""

        async def story(home: GatewayHost) -> None:
            session = await home.open("trial-4", SessionConfig(sampling=Sampling(max_tokens=4)))
            assert (await said(session))[0] == 200
            assert await home.publish(WeightUpdate(3, paused=True)) == 3
            held = asyncio.ensure_future(said(session, "again"))
            await asyncio.sleep(0.1)
            assert not held.done(), "calls are held while the engine is paused"
            assert await home.publish(WeightUpdate(3)) == 3
            assert (await held)[0] == 200
            episode = await session.close(Outcome.TRUNCATED, "enough")
            assert [span.version for node in episode.nodes for span in node.spans] == [0, 3]
            assert (episode.outcome, episode.reason) == (Outcome.TRUNCATED, "enough")

        self.use(tmp_path, story)
