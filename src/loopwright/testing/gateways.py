"""The contract of gateway hosts, as tests.

    class TestMine(GatewayContract):
        def make_host(self, directory: Path) -> GatewayHost:
            return MyHost(...)

Its engine may sample anything, in a few tokens.
"""
# ruff: noqa: S101  These are tests, although they are part of the package.

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
_TIMEOUT_S = 90.0


async def post(url: str, body: Mapping[str, Any], key: str) -> tuple[int, bytes]:
    """Send an agent's request; returns the status and body of the response."""
    import aiohttp

    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as client,
        client.post(url, json={"model": "any", **body}) as response,
    ):
        return response.status, await response.read()


async def chat(
    session: AgentSession, text: str = "hello", *, key: str | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Send a chat request in a session; returns the status and body of the response."""
    body = {"messages": [{"role": "user", "content": text}], **more}
    status, response = await post(f"{session.openai_base_url}/chat/completions", body, key or session.key)
    return status, orjson.loads(response)


async def stream(url: str, body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    status, response = await post(url, {**body, "stream": True}, key)
    assert status == 200, response
    lines = [line.removeprefix(b"data: ") for line in response.splitlines() if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


def _tokens(episode: Episode, number: int) -> tuple[list[int], tuple[int, ...], tuple[float, ...]]:
    """The prompt of a turn, and the ids and logprobs that were sampled."""
    ids = [token for index in episode.path(number) for token in episode.nodes[index].ids]
    count = episode.nodes[number].sampled
    return ids[:-count], tuple(ids[-count:]), episode.nodes[number].logprobs[-count:]


async def _sample_again(engine: Engine, episode: Episode, number: int) -> list[Chunk]:
    """Sample a turn once more: what was captured is what the engine samples there."""
    prompt, ids, logprobs = _tokens(episode, number)
    sampling = Sampling(max_tokens=6, top_logprobs=2)
    chunks = [chunk async for chunk in engine.generate(prompt, sampling, seed=f"s:{number}")]
    assert (ids_of(chunks), logprobs_of(chunks)) == (ids, logprobs)
    return chunks


class GatewayContract(ABC):
    """Subclass it, name the subclass `Test…`, and implement `make_host`."""

    @abstractmethod
    def make_host(self, directory: Path) -> GatewayHost:
        """The host under test, not yet started."""

    def make_engine(self, directory: Path) -> Engine | None:
        """Another instance of its engine, whose samples must equal what was captured; None to skip that."""
        return None

    def around(self, directory: Path) -> AbstractAsyncContextManager[Any]:
        """What the host needs, such as a remote gateway."""
        return nullcontext()

    def use(self, directory: Path, scenario: Callable[[GatewayHost], Awaitable[T]]) -> T:
        """Run `scenario` with the host in an event loop, and close it."""

        async def main() -> T:
            async with self.around(directory), aclosing(self.make_host(directory)) as host:
                await host.start()
                return await asyncio.wait_for(scenario(host), _TIMEOUT_S)

        return asyncio.run(main())

    def test_a_session_becomes_an_episode(self, tmp_path: Path) -> None:
        """With the ids, logprobs and version of each token; after that it accepts no more calls."""

        async def scenario(host: GatewayHost) -> None:
            session = await host.open("trial-1", SessionConfig(run="r", trial=1, sampling=Sampling(max_tokens=5)))
            assert session.id == "trial-1"
            assert session.openai_base_url.endswith("/trial-1/v1")
            assert session.anthropic_base_url.endswith("/trial-1")
            status, response = await chat(session)
            assert status == 200
            completed = await session.complete()
            episode = completed.episode
            assert (episode.turns, completed.broken, completed.silent_s) == (1, "", 0.0)
            assert episode.sampled == response["usage"]["completion_tokens"] <= 5
            assert episode.answer == (response["choices"][0]["message"]["content"] or "")
            assert "generate" in episode.attempts[-1].phases_s
            status, refusal = await chat(session)
            assert status == 409, "a call after the session was closed"
            assert "closed" in str(refusal) or "complete" in str(refusal)
            assert (await session.close()).nodes == episode.nodes, "closing it twice changes nothing"

        self.use(tmp_path, scenario)

    def test_responses_and_episodes_contain_each_sampled_token(self, tmp_path: Path) -> None:
        """Complete and streamed, in both dialects: the engine's ids, logprobs and alternatives, but no end token."""

        async def scenario(host: GatewayHost) -> None:
            session = await host.open("trial-5", SessionConfig(seed="s", sampling=Sampling(max_tokens=6)))
            options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
            _, response = await chat(session, "a", **options)
            body = {"messages": [{"role": "user", "content": "b"}], **options}
            chunks = await stream(f"{session.openai_base_url}/chat/completions", body, session.key)
            parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
            responses = [
                response["choices"][0]["logprobs"]["content"],
                [entry for logprobs in parts for entry in logprobs["content"]],
            ]
            body = {"messages": [{"role": "user", "content": "c"}], "max_tokens": 6}
            events = await stream(f"{session.anthropic_base_url}/v1/messages", body, session.key)
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            episode = await session.close()
            turns = [index for index, node in enumerate(episode.nodes) if node.spans]
            for turn, entries in zip(turns, responses, strict=False):
                end = -1 if episode.nodes[turn].finish == "stop" else None
                assert tuple(entry["logprob"] for entry in entries) == _tokens(episode, turn)[2][:end]
            text = "".join(delta.get("text", "") for delta in deltas)
            assert text == episode.nodes[turns[2]].message["content"]
            if (engine := self.make_engine(tmp_path)) is not None:
                samples = [await _sample_again(engine, episode, turn) for turn in turns]
                for entries, sampled in zip(responses, samples, strict=False):
                    tops = [[value for _, value in tops] for chunk in sampled for tops in chunk.tops or ()]
                    alternatives = [[each["logprob"] for each in entry["top_logprobs"]] for entry in entries]
                    assert alternatives == tops[: len(entries)]
                await engine.close()

        self.use(tmp_path, scenario)

    def test_unknown_token_ids_are_refused(self, tmp_path: Path) -> None:
        """As the request's fault: this session and all others continue."""

        async def scenario(host: GatewayHost) -> None:
            session = await host.open("trial-6", SessionConfig(sampling=Sampling(max_tokens=4)))
            status, response = await post(
                f"{session.openai_base_url}/completions", {"prompt": [2_000_000_000]}, session.key
            )
            assert (status, orjson.loads(response)["error"]["type"]) == (400, "invalid_request_error"), response
            assert (await chat(session))[0] == 200
            assert (await session.complete()).broken == ""

        self.use(tmp_path, scenario)

    def test_the_same_id_is_the_same_session(self, tmp_path: Path) -> None:
        """For the same run and trial; for another trial it is refused."""

        async def scenario(host: GatewayHost) -> None:
            first = await host.open("trial-2", SessionConfig(run="r", trial=2))
            again = await host.open("trial-2", SessionConfig(run="r", trial=2))
            assert (first.id, first.key) == (again.id, again.key)
            with pytest.raises(Refusal, match="belongs to another run or trial"):
                await host.open("trial-2", SessionConfig(run="r", trial=3))
            other = await host.open()
            assert other.id != first.id
            assert other.key != first.key

        self.use(tmp_path, scenario)

    def test_a_wrong_key_is_refused(self, tmp_path: Path) -> None:
        """Another session's key, and a wrong token of the gateway."""

        async def scenario(host: GatewayHost) -> None:
            mine, other = await host.open("a"), await host.open("b")
            assert (await chat(mine, key=other.key))[0] == 401
            assert (await chat(mine))[0] == 200
            access = await host.access()
            async with GatewayClient(access.url, "no-such-token-at-all") as stranger:
                with pytest.raises(Refusal, match="token"):
                    await stranger.open()
                with pytest.raises(Refusal, match="token"):
                    await stranger.publish(WeightUpdate(7))

        self.use(tmp_path, scenario)

    def test_a_session_can_be_deleted(self, tmp_path: Path) -> None:
        """With everything that was recorded of it."""

        async def scenario(host: GatewayHost) -> None:
            session = await host.open("gone")
            await session.delete()
            await session.delete()
            with pytest.raises(Refusal, match="does not exist"):
                await session.describe()
            assert (await chat(session))[0] == 404

        self.use(tmp_path, scenario)

    def test_weight_updates_reach_its_engine(self, tmp_path: Path) -> None:
        """Each token has the version that sampled it."""

        async def scenario(host: GatewayHost) -> None:
            session = await host.open("trial-4", SessionConfig(sampling=Sampling(max_tokens=4)))
            assert (await chat(session))[0] == 200
            assert await host.publish(WeightUpdate(3, paused=True)) == 3
            waiting = asyncio.ensure_future(chat(session, "again"))
            await asyncio.sleep(0.1)
            assert not waiting.done(), "calls wait while the engine is paused"
            assert await host.publish(WeightUpdate(3)) == 3
            assert (await waiting)[0] == 200
            episode = await session.close(Outcome.TRUNCATED, "enough")
            assert [span.version for node in episode.nodes for span in node.spans] == [0, 3]
            assert (episode.outcome, episode.reason) == (Outcome.TRUNCATED, "enough")

        self.use(tmp_path, scenario)
