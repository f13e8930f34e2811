"""docs/live-protocol.md: its example frames match the code."""

import json
import re
import socket
from pathlib import Path

import pytest
from tests.envs.live.peers import Walker, raw, scripted, serving, welcome

from loopwright.envs.live import remote
from loopwright.envs.live.wire import HEADER_BYTES, MAX_FRAME_BYTES, VERSION, frame, unpack

PAGE = (Path(__file__).parents[3] / "docs" / "live-protocol.md").read_text()


def decode_hex(value):
    if isinstance(value, str) and value.startswith("hex:"):
        return bytes.fromhex(value[4:])
    if isinstance(value, dict):
        return {key: decode_hex(item) for key, item in value.items()}
    return [decode_hex(item) for item in value] if isinstance(value, list) else value


EXAMPLES = [
    (decode_hex(json.loads(words)), bytes.fromhex(digits))
    for words, digits in re.findall(r"```frame\n(\{.*\})\n([0-9A-F\s]+)```", PAGE)
]


@pytest.mark.parametrize(("message", "data"), EXAMPLES, ids=[message["type"] for message, _ in EXAMPLES])
def test_each_example_is_exact(message, data):
    assert frame(message) == data
    assert unpack(data[HEADER_BYTES:]) == message


def test_every_message_has_an_example():
    kinds = {"hello", "welcome", "reset", "state", "step", "result", "ping", "pong", "close", "error"}
    assert {message["type"] for message, _ in EXAMPLES} == kinds
    assert f"version {VERSION}\n" in PAGE.splitlines(keepends=True)[0]
    assert f"{MAX_FRAME_BYTES:,}" in PAGE


def test_the_client_sends_what_the_document_says(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "version", lambda _: "")
    sent = []
    sendall = socket.socket.sendall

    class Listening(socket.socket):
        def sendall(self, data):
            sent.append(bytes(data))
            sendall(self, data)

    answers = {message["type"]: data for message, data in reversed(EXAMPLES)}
    with scripted(tmp_path / "s", answers["welcome"], answers["state"], answers["result"], answers["pong"]) as address:
        plain = remote.Address.connect

        def connect(self, timeout_s):
            return Listening(fileno=plain(self, timeout_s).detach())

        monkeypatch.setattr(remote.Address, "connect", connect)
        server = remote.RemoteServer(address)
        observation, info = server.reset(seed=7)
        assert (observation.tolist(), info) == ([0.5, -2], {})
        observation, *rest = server.step(2)
        assert (observation.tolist(), rest) == ([1, -2], [-1.5, False, True, {"lap": 3}])
        server.ping()
        server.close()
    hello = next(message for message, _ in EXAMPLES if message["type"] == "hello")
    assert sent == [
        frame({**hello, "name": "loopwright "}),
        *(answers[kind] for kind in ("reset", "step", "ping", "close")),
    ]


def test_the_server_responds_as_the_document_says(tmp_path):
    with serving(Walker, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        client.send({"type": "hello", "version": 1, "name": "demo", "later": "unknown keys are ignored"})
        greeting = client.receive()
        assert {**welcome(), "name": greeting["name"], "metadata": {"render_modes": []}, "heartbeat_s": 0} == greeting
        client.send({"type": "reset", "seed": None, "options": {"start": 1}})
        data = b"\x00\x00\x80\x3f\x00\x00\xa0\x40"
        assert client.receive() == {
            "type": "state",
            "obs": {"nd": "float32", "shape": [2], "data": data},
            "info": {"seed": None},
        }
        client.send({"type": "ping"})
        assert client.receive() == {"type": "pong"}
        client.send({"type": "step", "action": "left"})
        refused = client.receive()
        assert (refused["type"], refused["kind"]) == ("error", "action")
        client.send({"type": "step", "action": 2})
        assert client.receive()["reward"] == -2.0
