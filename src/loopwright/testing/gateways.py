"""What every home of a gateway promises, as tests.

    class TestMine(GatewayContract):
        def make_home(self, home: Path) -> Home:
            return MyHome(...)

Its engine answers whatever it likes, in a few tokens.
"""
# ruff: noqa: S101  These are tests, wherever they stand.

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loopwright.core.outcome import Outcome
from loopwright.engines.base import Sampling
from loopwright.engines.news import News
from loopwright.gateway.client import GatewayClient, RemoteSession
from loopwright.gateway.refusal import Refused
from loopwright.gateway.terms import Terms
from loopwright.rollouts.remote.home import Home

T = TypeVar("T")
_LONGEST_S = 90.0


async def said(session: RemoteSession, text: str = "hello", *, key: str | None = None) -> tuple[int, dict[str, Any]]:
    """Have an agent of this session say something: status and body of what it is answered."""
    import aiohttp

    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key or session.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{session.openai_base_url}/chat/completions", json=body) as response,
    ):
        return response.status, await response.json()


class GatewayContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it a home."""

    @abstractmethod
    def make_home(self, home: Path) -> Home:
        """The home that is tested, not yet started."""

    def around(self, home: Path) -> AbstractAsyncContextManager[Any]:
        """What has to be there for it, such as a gateway elsewhere."""
        return nullcontext()

    def use(self, home: Path, story: Callable[[Home], Awaitable[T]]) -> T:
        """Run `story` with the home in an event loop, and close it."""

        async def main() -> T:
            async with self.around(home), aclosing(self.make_home(home)) as made:
                await made.start()
                return await asyncio.wait_for(story(made), _LONGEST_S)

        return asyncio.run(main())

    def test_a_session_becomes_an_episode(self, tmp_path: Path) -> None:
        """With the ids, logprobs and version of each token; and then takes no more calls."""

        async def story(home: Home) -> None:
            session = await home.open("trial-1", Terms(run="r", trial=1, sampling=Sampling(max_tokens=5)))
            assert session.id == "trial-1"
            assert session.openai_base_url.endswith("/trial-1/v1")
            assert session.anthropic_base_url.endswith("/trial-1")
            status, answer = await said(session)
            assert status == 200
            captured = await session.captured()
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

    def test_the_same_id_is_the_same_session(self, tmp_path: Path) -> None:
        """For the same run and trial; another trial's is refused."""

        async def story(home: Home) -> None:
            first = await home.open("trial-2", Terms(run="r", trial=2))
            again = await home.open("trial-2", Terms(run="r", trial=2))
            assert (first.id, first.key) == (again.id, again.key)
            with pytest.raises(Refused, match="belongs to another run or trial"):
                await home.open("trial-2", Terms(run="r", trial=3))
            other = await home.open()
            assert other.id != first.id
            assert other.key != first.key

        self.use(tmp_path, story)

    def test_a_wrong_key_is_refused(self, tmp_path: Path) -> None:
        """Another session's, and the lack of the gateway's own."""

        async def story(home: Home) -> None:
            mine, other = await home.open("a"), await home.open("b")
            assert (await said(mine, key=other.key))[0] == 401
            assert (await said(mine))[0] == 200
            access = await home.access()
            async with GatewayClient(access.url, "no-such-token-at-all") as stranger:
                with pytest.raises(Refused, match="token"):
                    await stranger.open()
                with pytest.raises(Refused, match="token"):
                    await stranger.tell(News(7))

        self.use(tmp_path, story)

    def test_a_session_can_be_forgotten(self, tmp_path: Path) -> None:
        """With all that was recorded of it."""

        async def story(home: Home) -> None:
            session = await home.open("gone")
            await session.delete()
            await session.delete()
            with pytest.raises(Refused, match="no session"):
                await session.described()
            assert (await said(session))[0] == 404

        self.use(tmp_path, story)

    def test_news_of_the_policy_reach_its_engine(self, tmp_path: Path) -> None:
        """Each token says which version sampled it."""

        async def story(home: Home) -> None:
            session = await home.open("trial-4", Terms(sampling=Sampling(max_tokens=4)))
            assert (await said(session))[0] == 200
            assert await home.tell(News(3, paused=True)) == 3
            held = asyncio.ensure_future(said(session, "again"))
            await asyncio.sleep(0.1)
            assert not held.done(), "calls are held while the engine is paused"
            assert await home.tell(News(3)) == 3
            assert (await held)[0] == 200
            episode = await session.close(Outcome.TRUNCATED, "enough")
            assert [span.version for node in episode.nodes for span in node.spans] == [0, 3]
            assert (episode.outcome, episode.reason) == (Outcome.TRUNCATED, "enough")

        self.use(tmp_path, story)
