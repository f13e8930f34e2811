"""Serving: several clients, clients that vanish or talk nonsense, and the places where one may listen."""

import re
import socket
import stat
import threading

import numpy as np
import pytest
from tests.envs.live.peers import Gate, Walker, raw, served

from loopwright.envs.live.address import Address, AddressError
from loopwright.envs.live.remote import RemoteServer
from loopwright.envs.live.serve import EnvServer
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


def test_two_clients_step_at_once_each_in_its_own_environment(tmp_path):
    with served(Together, f"unix://{tmp_path}/s") as server:
        clients = [RemoteServer(server.address) for _ in range(2)]
        found = {}

        def walk(client, action):
            client.reset()
            found[action] = [client.step(action)[0][0] for _ in range(3)]
            client.close()

        threads = [threading.Thread(target=walk, args=pair) for pair in zip(clients, (0, 2), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: [-1, -2, -3], 2: [1, 2, 3]}


def test_a_client_that_vanishes_in_mid_step_takes_only_its_environment_with_it(tmp_path):
    made = []

    def make():
        made.append(Gate())
        return made[-1]

    with served(make, f"unix://{tmp_path}/s") as server:
        with raw(server.address) as client:
            greet(client)
            client.send({"type": "step", "action": 1})
            assert made[0].entered.wait(30)
        made[0].go_on.set()
        assert made[0].closed.wait(30)
        there = RemoteServer(server.address)
        there.reset()
        made[1].go_on.set()
        assert there.step(2)[0].tolist() == [1, 4]
        there.close()
        assert made[1].closed.wait(30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of "),
        (b"\0\0\0\3\xc1\xc1\xc1", "not valid MessagePack"),
        (b"\0\0\0\x0b\x81\xa4type\xa4ping", "'ping' before 'hello'"),
    ],
)
def test_a_client_that_talks_nonsense_is_told_and_dropped(tmp_path, data, words):
    with served(Walker, f"unix://{tmp_path}/s") as server:
        with raw(server.address) as client:
            client._socket.sendall(data)
            answer = client.receive()
            assert (answer["type"], answer["kind"]) == ("error", "malformed")
            assert words in answer["message"]
            with pytest.raises((EOFError, ConnectionResetError)):
                client.receive()
        RemoteServer(server.address).close()


def test_an_unknown_request_is_malformed(tmp_path):
    with served(Walker, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        greet(client)
        client.send({"type": "render"})
        assert "unknown request type 'render'" in client.receive()["message"]


def test_an_environment_that_fails_to_close_harms_nobody(tmp_path, caplog):
    closed = threading.Event()

    class Stuck(Walker):
        def close(self):
            closed.set()
            raise RuntimeError("stuck")

    with served(Stuck, f"unix://{tmp_path}/s") as server:
        RemoteServer(server.address).close()
        assert closed.wait(30)
        there = RemoteServer(server.address)
        there.reset()
        there.close()
    assert "failed to close" in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((0.0, "1.0", False, False, {}), "reward: expected a number, got '1.0'"),
        ((0.0, True, False, False, {}), "reward: expected a number, got True"),
        ((0.0, 1.0, "no", False, {}), "terminated: expected true or false, got 'no'"),
        ((0.0, 1.0, False, None, {}), "truncated: expected true or false, got None"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_environment_that_gives_nonsense_is_not_made_sense_of(tmp_path, answer, said):
    class Mad(Walker):
        def step(self, action):
            if isinstance(answer, SystemExit):
                raise answer
            return self._seen(), *answer[1:]

    with served(Mad, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()
        with pytest.raises(ServerError, match=re.escape(said)):
            there.step(1)
        there.reset()
        there.close()


def test_closing_the_server_closes_every_environment(tmp_path):
    walker = Walker()
    with served(lambda: walker, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()
    assert walker.closed.is_set()
    there.close()


def test_a_unix_socket_is_the_owners_alone_and_goes_with_the_server(tmp_path):
    path = tmp_path / "s"
    with served(Walker, f"unix://{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_dead_socket_file_is_replaced_a_live_one_and_a_real_file_are_not(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with served(Walker, f"unix://{path}") as server:
        with pytest.raises(AddressError, match="another server uses it"):
            EnvServer(Walker, f"unix://{path}")
        RemoteServer(server.address).close()
    path.write_text("precious")
    with pytest.raises(AddressError, match="is not a socket"):
        EnvServer(Walker, f"unix://{path}")
    assert path.read_text() == "precious"


def test_a_server_removes_no_socket_but_its_own(tmp_path):
    path = tmp_path / "s"
    with EnvServer(Walker, f"unix://{path}"):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "new"))
            (tmp_path / "new").rename(path)
    assert path.exists()


def test_tcp_is_for_this_machine_unless_said_otherwise():
    with pytest.raises(AddressError, match=r"can be reached from other machines.*--public"):
        EnvServer(Walker, "tcp://0.0.0.0:0")
    with EnvServer(Walker, "tcp://0.0.0.0:0", public=True) as server:
        assert not server.address.endswith(":0")
        with pytest.raises(AddressError, match="Address already in use"):
            EnvServer(Walker, server.address.replace("0.0.0.0", "127.0.0.1"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/run/s",
        "unix://",
        "unix://relative/s",
        "tcp://",
        "tcp://host",
        "tcp://:80",
        "tcp://h:port",
        "tcp://h:1/x",
        "http://h:1",
    ],
)
def test_an_address_that_is_none_says_how_to_write_one(text):
    with pytest.raises(AddressError, match=r"Write 'unix:///path/to.sock' or 'tcp://host:port'\."):
        Address.parse(text)


@pytest.mark.parametrize("text", ["unix:///run/a b#c?.sock", "tcp://localhost:5555", "tcp://[::1]:5555"])
def test_an_address_reads_as_it_was_written(text):
    assert str(Address.parse(text)) == text


def test_a_path_too_long_or_in_no_directory_is_an_address_error(tmp_path):
    for path in (tmp_path / ("x" * 200), tmp_path / "no" / "such"):
        with pytest.raises(AddressError, match="cannot listen at"):
            EnvServer(Walker, f"unix://{path}")


def test_an_observation_larger_than_a_frame_is_told(tmp_path):
    class Huge(Walker):
        def step(self, action):
            return np.zeros(65 * 2**20, np.uint8), 0.0, False, False, {}

    with served(Huge, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        greet(client)
        client.send({"type": "step", "action": 1})
        answer = client.receive()
        assert answer["kind"] == "environment"
        assert "at most 67,108,864 are allowed" in answer["message"]
