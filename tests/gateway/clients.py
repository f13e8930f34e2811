"""Ways to ask a gateway: through the SDKs, over bare HTTP, and in a process of its own."""

import subprocess
import sys
from pathlib import Path

from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine


def serving(words):
    """A gateway in a process of its own, and its address."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    if line := process.stdout.readline():
        return process, line.split()[3].rstrip(";")
    process.stdout.close()
    raise AssertionError(f"no gateway, but exit code {process.wait()}; its stderr says why")


async def chat(client, messages, **more):
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def streamed(client, messages, **more):
    return [chunk async for chunk in await chat(client, messages, stream=True, **more)]


async def followed(client, messages, heard):
    """Streams into a list, so that what was heard before an error is there after it."""
    async for chunk in await chat(client, messages, stream=True):
        heard.append(chunk)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def asked(http, method, url, *, key=None, **more):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with http.request(method, url, headers=headers, **more) as answer:
        return answer.status, await answer.json(), answer.headers


COUNTED = " ".join(map(str, range(100)))


def slow_engine(said=COUNTED):
    return ScriptedEngine(ScriptedConfig(replies=(said,), slip=0.0, token_s=0.005), Path())


def spans_of(episode):
    return [(span.stop - span.start, span.version) for node in episode.nodes for span in node.spans]


def exact(engine, session):
    """What the engine was given and gave is what the paths through the episode hold."""
    episode = session.episode()
    paths = {tuple(t for i in episode.path(n) for t in episode.nodes[i].ids) for n in range(1, len(episode.nodes))}
    assert {(*given, *gave) for given, gave, *_ in engine.calls} <= paths
    assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled
    return episode
