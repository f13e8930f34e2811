"""The protocol server: several clients, and clients or environments that misbehave."""

import re
import threading

import numpy as np
import pytest
from tests.envs.live.peers import BlockingWalker, Walker, raw, serving

from loopwright.envs.live.remote import RemoteServer
from loopwright.envs.live.server import ServerError


def greet(client):
    client.send({"type": "hello", "version": 1, "name": "test"})
    assert client.receive()["type"] == "welcome"
    client.send({"type": "reset", "seed": None, "options": None})
    assert client.receive()["type"] == "state"


class Together(Walker):
    """Two of them step at the same time, or neither does."""

    barrier = threading.Barrier(2, timeout=30)

    def step(self, action):
        self.barrier.wait()
        return super().step(action)


def test_two_clients_step_concurrently_in_their_own_environments(tmp_path):
    with serving(Together, f"unix://{tmp_path}/s") as server:
        clients = [RemoteServer(server.address) for _ in range(2)]
        positions = {}

        def walk(client, action):
            client.reset()
            positions[action] = [client.step(action)[0][0] for _ in range(3)]
            client.close()

        threads = [threading.Thread(target=walk, args=pair) for pair in zip(clients, (0, 2), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert positions == {0: [-1, -2, -3], 2: [1, 2, 3]}


def test_a_client_that_disconnects_during_a_step_closes_only_its_environment(tmp_path):
    walkers = []

    def make():
        walkers.append(BlockingWalker())
        return walkers[-1]

    with serving(make, f"unix://{tmp_path}/s") as server:
        with raw(server.address) as client:
            greet(client)
            client.send({"type": "step", "action": 1})
            assert walkers[0].entered.wait(30)
        walkers[0].proceed.set()
        assert walkers[0].closed.wait(30)
        there = RemoteServer(server.address)
        there.reset()
        walkers[1].proceed.set()
        assert there.step(2)[0].tolist() == [1, 4]
        there.close()
        assert walkers[1].closed.wait(30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of "),
        (b"\0\0\0\3\xc1\xc1\xc1", "not valid MessagePack"),
        (b"\0\0\0\x0b\x81\xa4type\xa4ping", "'ping' before 'hello'"),
    ],
)
def test_a_client_that_sends_garbage_gets_an_error_and_is_disconnected(tmp_path, data, words):
    with serving(Walker, f"unix://{tmp_path}/s") as server:
        with raw(server.address) as client:
            client._socket.sendall(data)
            answer = client.receive()
            assert (answer["type"], answer["kind"]) == ("error", "malformed")
            assert words in answer["message"]
            with pytest.raises((EOFError, ConnectionResetError)):
                client.receive()
        RemoteServer(server.address).close()


def test_an_unknown_request_is_malformed(tmp_path):
    with serving(Walker, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        greet(client)
        client.send({"type": "render"})
        assert "unknown request type 'render'" in client.receive()["message"]


def test_an_environment_that_fails_to_close_is_logged(tmp_path, caplog):
    closed = threading.Event()

    class Stuck(Walker):
        def close(self):
            closed.set()
            raise RuntimeError("stuck")

    with serving(Stuck, f"unix://{tmp_path}/s") as server:
        RemoteServer(server.address).close()
        assert closed.wait(30)
        there = RemoteServer(server.address)
        there.reset()
        there.close()
    assert "failed to close" in caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((0.0, "1.0", False, False, {}), "reward: expected a number, got '1.0'"),
        ((0.0, True, False, False, {}), "reward: expected a number, got True"),
        ((0.0, 1.0, "no", False, {}), "terminated: expected true or false, got 'no'"),
        ((0.0, 1.0, False, None, {}), "truncated: expected true or false, got None"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_unusable_step_is_an_error_of_the_environment(tmp_path, answer, message):
    class Mad(Walker):
        def step(self, action):
            if isinstance(answer, SystemExit):
                raise answer
            return self._observation(), *answer[1:]

    with serving(Mad, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()
        with pytest.raises(ServerError, match=re.escape(message)):
            there.step(1)
        there.reset()
        there.close()


def test_closing_the_server_closes_every_environment(tmp_path):
    walker = Walker()
    with serving(lambda: walker, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()
    assert walker.closed.is_set()
    there.close()


def test_an_observation_larger_than_a_frame_is_an_error(tmp_path):
    class Huge(Walker):
        def step(self, action):
            return np.zeros(65 * 2**20, np.uint8), 0.0, False, False, {}

    with serving(Huge, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        greet(client)
        client.send({"type": "step", "action": 1})
        answer = client.receive()
        assert answer["kind"] == "environment"
        assert "at most 67,108,864 are allowed" in answer["message"]
