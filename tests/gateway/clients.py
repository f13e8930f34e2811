"""Clients of a gateway: SDKs, plain HTTP, and a gateway in a separate process."""

import subprocess
import sys
from pathlib import Path

from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine


def serving(words):
    """A gateway in a separate process, and its address."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    if line := process.stdout.readline():
        return process, line.split()[3].rstrip(";")
    process.stdout.close()
    raise AssertionError(f"no gateway, but exit code {process.wait()}; its stderr says why")


async def chat(client, messages, **more):
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def streamed(client, messages, **more):
    return [chunk async for chunk in await chat(client, messages, stream=True, **more)]


async def followed(client, messages, chunks):
    """Stream into a list, so that chunks before an error are kept."""
    async for chunk in await chat(client, messages, stream=True):
        chunks.append(chunk)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def send(http, method, url, *, key=None, **more):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with http.request(method, url, headers=headers, **more) as answer:
        return answer.status, await answer.json(), answer.headers


COUNTED = " ".join(map(str, range(100)))


def slow_engine(reply=COUNTED):
    return ScriptedEngine(ScriptedConfig(replies=(reply,), slip=0.0, token_s=0.005), Path())


def spans_of(episode):
    return [(span.stop - span.start, span.version) for node in episode.nodes for span in node.spans]


def exact(engine, session):
    """Check that the engine's prompts and tokens are exactly the paths of the episode."""
    episode = session.episode()
    paths = {tuple(t for i in episode.path(n) for t in episode.nodes[i].ids) for n in range(1, len(episode.nodes))}
    assert {(*prompt, *sampled) for prompt, sampled, *_ in engine.calls} <= paths
    assert sum(sum(row.response_mask) for row in episode.rows(with_abandoned=True)) == episode.sampled
    return episode
