"""Contract A05: a run owns the sessions of its agents, and a user owns those that they opened themselves."""

import asyncio
import json
from contextlib import aclosing

import aiohttp
import pytest

from loopwright.core.outcome import Outcome
from loopwright.gateway.client import GatewayClient
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.ledger.ledger import Ledger
from loopwright.rollouts.remote.gateway_host import ExternalGatewayHost, GatewayAccess
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from tests.gateway.clients import send
from tests.gateway.harness import run, serve
from tests.rollouts.remote.agents import run_agent, scenario

OWNER = "the-key-of-the-run-1234"
# An agent that does all it can to end, read or take over its own session, and then fails its task.
ERASE = """
session = os.environ["LOOPWRIGHT_SESSION"]
address = os.environ["ANTHROPIC_BASE_URL"].removesuffix("/" + session)

import urllib.error

def attempt(method, path, body=None):
    request = urllib.request.Request(
        address + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return [response.status, response.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]

chat()
trial = int(os.environ["LOOPWRIGHT_TRIAL_NUMBER"])
print(json.dumps([
    attempt("DELETE", f"/sessions/{session}"),
    attempt("POST", f"/sessions/{session}/complete", {"outcome": "lost", "reason": "not me"}),
    attempt("POST", f"/sessions/{session}/freeze"),
    attempt("GET", f"/sessions/{session}"),
    attempt("POST", f"/sessions/{session}", {"run": "r", "trial": trial}),
]))
chat("and again")
"""


@pytest.mark.parametrize("over_http", [False, True])
def test_a05_an_agent_that_ends_its_session_is_refused_and_scored_as_it_stands(tmp_path, over_http):
    episode = run_agent(tmp_path, ERASE, over_http=over_http)

    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.OK, None, 2)
    *refusals, (reopened, _) = json.loads(episode.evidence["agent"]["stdout"])
    assert [status for status, _ in refusals] == [403] * 4
    for _, body in refusals:
        assert "belongs to the run that opened it: this key may only call models" in body
    assert reopened in (401, 409)


GUIDED = """
body = {"messages": [{"role": "user", "content": "hi"}], "guided_grammar": "(", "logit_bias": {"5": 1}}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    print(response.headers["x-loopwright-ignored"])
"""


def test_a05_an_agent_cannot_make_its_turns_untrainable_or_break_them_with_a_grammar(tmp_path):
    episode = run_agent(tmp_path, GUIDED)

    assert (episode.outcome, episode.turns, len(episode.rows())) == (Outcome.OK, 1, 1)
    assert "guided_grammar" in episode.evidence["agent"]["stdout"]


def test_a05_a_run_at_a_gateway_without_a_token_keeps_its_sessions(tmp_path):
    async def story():
        async with serve(output=tmp_path / "gw") as gateway:
            more = f'[run.gateway]\ntype = "external"\nurl = "{gateway.address}"\n'
            (tmp_path / "s.toml").write_text(scenario(tmp_path, ERASE, more=more))
            code = await asyncio.to_thread(dispatch, load(tmp_path / "s.toml"), tmp_path / "out")
            statuses = {session.status for session in gateway.sessions.values()}
            return code, statuses

    code, statuses = run(story)
    assert (code, statuses) == (0, {"complete"})
    with Ledger.read(tmp_path / "out" / "work" / "ledger.db") as ledger:
        trials = list(ledger.trials())
    assert [(trial.outcome, trial.fault) for trial in trials] == [(Outcome.OK, None)] * 6
    assert all(trial.reward is not None for trial in trials)


def test_a05_the_key_of_the_run_survives_a_restart_of_the_gateway(tmp_path):
    async def story():
        config = SessionConfig(run="r", trial=1, owner_key=OWNER)
        async with serve(output=tmp_path) as gateway:
            key = (await gateway.open("t", config)).key
        async with serve(output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            path = f"{gateway.address}/sessions/t"
            for method, at in (("DELETE", path), ("GET", path), ("POST", f"{path}/complete")):
                assert (await send(http, method, at, key=key))[0] == 403
            assert (await send(http, "GET", f"{gateway.address}/t/v1/models", key=key))[0] == 200
            assert (await send(http, "GET", f"{gateway.address}/t/v1/models", key=OWNER))[0] == 401
            assert (await send(http, "POST", f"{path}/complete", key=OWNER))[0] == 200
            assert (await send(http, "DELETE", path, key=OWNER))[0] == 200

    run(story)


def test_a05_the_same_id_is_opened_again_only_with_the_key_of_the_run():
    async def story():
        async with serve() as gateway, aclosing(ExternalGatewayHost(GatewayAccess(gateway.address))) as host:
            config = SessionConfig(run="r", trial=1, owner_key=OWNER)
            session = await host.open("t", config)
            assert (await host.open("t", config)).key == session.key
            for other in (None, "another-key-of-16-letters"):
                with pytest.raises(Refusal, match="belongs to another run or trial"):
                    await host.open("t", config.model_copy(update={"owner_key": other}))
            await session.describe()
            assert (await session.complete()).episode.outcome is Outcome.OK
            await session.delete()
            assert OWNER not in repr(session) + repr(config)

    run(story)


def test_a05_a_session_that_a_user_opened_belongs_to_its_key():
    async def story():
        async with serve() as gateway, GatewayClient(gateway.address) as client:
            session = await client.open()
            assert (await session.describe())["status"] == "open"
            await session.complete()
            await session.delete()
            assert session.id not in gateway.sessions

    run(story)


def test_a05_the_token_of_the_gateway_ends_every_session():
    async def story():
        token = "a token of the gateway"
        async with serve(token=token) as gateway, aiohttp.ClientSession() as http:
            await gateway.open("t", SessionConfig(owner_key=OWNER))
            path = f"{gateway.address}/sessions/t"
            assert (await send(http, "POST", f"{path}/complete", key=token))[0] == 200
            assert (await send(http, "DELETE", path, key=token))[0] == 200

    run(story)
