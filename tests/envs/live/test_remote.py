"""Stepping over real sockets, and every way in which the peer can fail."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.live.peers import BOX, BlockingWalker, Walker, raw, result, scripted, serving, welcome

from loopwright.core.errors import InvalidAction
from loopwright.envs.live.remote import RemoteServer
from loopwright.envs.live.server import ServerError, ServerLost, make_server
from loopwright.envs.live.wire import MAX_FRAME_BYTES, frame


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    return f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"


def test_a_remote_environment_behaves_like_a_local_one(address):
    here = make_server("gymnasium:CartPole-v1", {}, Path())
    with serving(lambda: make_server("gymnasium:CartPole-v1", {}, Path()), address) as server:
        there = RemoteServer(server.address, validate=True)
        assert (there.observation_space, there.action_space) == (here.observation_space, here.action_space)
        assert there.metadata["render_fps"] == here.metadata["render_fps"]
        there.ping()
        for seed in (1, 2):
            one, other = here.reset(seed=seed), there.reset(seed=seed)
            over = False
            while not over:
                np.testing.assert_array_equal(one[0], other[0])
                assert one[0].dtype == other[0].dtype
                assert one[1:] == other[1:]
                assert other[0].flags.writeable
                one, other = here.step(1), there.step(np.int64(1))
                over = one[2]
        there.close()
        there.close()
    here.close()


class Everything(Walker):
    """Has every kind of space, and returns its action as the observation."""

    observation_space = action_space = spaces.Dict(
        box=spaces.Box(0, 255, (3, 2), np.uint8),
        many=spaces.Tuple([spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3), spaces.Discrete(4, start=-1)]),
        text=spaces.Text(5),
    )

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {"given": options, "odd": {1, 2}, "array": np.arange(3)}

    def step(self, action):
        assert action in self.action_space
        return action, np.float32(0.5), np.bool_(True), False, {}


def test_all_spaces_and_info_survive_both_directions(tmp_path):
    with serving(Everything, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address, validate=True)
        observation, info = there.reset(seed=1, options={"level": 3, "mask": np.array([True, False])})
        assert observation in there.observation_space
        assert info["given"]["level"] == 3
        assert info["given"]["mask"].dtype == bool
        assert info["array"].tolist() == [0, 1, 2]
        assert info["odd"] == "{1, 2}"
        for _ in range(10):
            action = there.action_space.sample()
            observation, reward, terminated, truncated, _ = there.step(action)
            assert there.observation_space.contains(observation)
            np.testing.assert_equal(observation, action)
            assert (reward, terminated, truncated) == (0.5, True, False)
        there.close()


class Large(Walker):
    """Its observations exceed one read of the socket."""

    observation_space = spaces.Box(0, 255, (512, 1024, 3), np.uint8)

    def _observation(self):
        return np.full((512, 1024, 3), self.left, np.uint8)


def test_a_large_observation_arrives_complete(address):
    with serving(Large, address) as server:
        there = RemoteServer(server.address)
        assert (there.reset()[0] == 5).all()
        assert (there.step(1)[0] == 4).all()
        there.close()


class Raises(Walker):
    """Fails on request."""

    def step(self, action):
        if action == 2:
            raise RuntimeError("the motor is hot")
        if action == 0:
            return object(), 0.0, False, False, {}
        return super().step(action)


def test_an_error_of_the_environment_keeps_the_connection(tmp_path):
    with serving(Raises, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()
        with pytest.raises(ServerError, match="failed in 'step': RuntimeError: the motor is hot"):
            there.step(2)
        with pytest.raises(ServerError, match="cannot be sent"):
            there.step(0)
        with pytest.raises(InvalidAction, match="action: expected an integer, got 'up'"):
            there.step("up")
        with pytest.raises(InvalidAction, match="'step' cannot be sent"):
            there.step(object())
        assert there.step(1)[1] == 0
        there.close()


def test_an_environment_that_cannot_be_created_is_a_server_error(tmp_path):
    def make():
        raise OSError("no such robot")

    with serving(make, f"unix://{tmp_path}/s") as server, pytest.raises(ServerError, match="OSError: no such robot"):
        RemoteServer(server.address)


# Servers that send unusable responses


def nested(depth):
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"obs": [0.5, float("nan")]}, r"sent obs: element \[1\] is nan"),
        ({"obs": [0.5, float("inf")]}, r"sent obs: element \[1\] is inf"),
        ({"obs": np.zeros(3, np.float32)}, r"sent obs: expected shape \(2,\), got \(3,\)"),
        ({"obs": [1, 2, 3]}, r"sent obs: expected shape \(2,\), got \(3,\)"),
        ({"obs": np.zeros(2, np.float64)}, "sent obs: expected numbers of float32, got float64"),
        ({"obs": "north"}, "sent obs: expected numbers of float32, got 'north'"),
        ({"obs": ...}, "sent obs: expected numbers of float32, got None"),
        ({"reward": "much"}, "sent reward: expected a number, got 'much'"),
        ({"reward": True}, "sent reward: expected a number, got True"),
        ({"reward": float("nan")}, "sent reward: expected a finite number, got nan"),
        ({"reward": ...}, "sent reward: expected a number, got None"),
        ({"terminated": 1}, "sent terminated: expected true or false, got 1"),
        ({"truncated": None}, "sent truncated: expected true or false, got None"),
        ({"info": [1]}, r"sent info: expected a map, got \[1\]"),
        ({"info": {"deep": nested(400)}}, "sent info: nested more than 32 levels deep"),
        ({"info": {"a": {"nd": "x", "shape": [], "data": b""}}}, "sent info: unknown dtype 'x'"),
    ],
)
def test_an_unusable_response_names_its_field_and_keeps_the_connection(tmp_path, changes, words):
    with scripted(tmp_path / "s", welcome(), result(**changes), result(reward=2)) as address:
        server = RemoteServer(address, validate=True)
        with pytest.raises(ServerError, match=words):
            server.step(1)
        assert server.step(1)[1:] == (2.0, False, False, {})
        server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it violated the protocol: a frame of 1,213,486,160 bytes"),
        (b"\0\0\0\4\xc1\xc1\xc1\xc1", "it violated the protocol: a frame is not valid MessagePack"),
        (b"\0\0\0\1\x05", "is not a map with a 'type'"),
        (b"\0\0\0\0", "a frame is not valid MessagePack"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "a frame of 67,108,865 bytes"),
        ({"type": "state", "obs": [1, 2], "info": {}}, "it sent 'state' in response to 'step'"),
        ({"type": "error", "kind": "malformed", "message": "what?"}, r"refused 'step' \(malformed\): what?"),
        (None, "the connection broke during 'step'"),
    ],
)
def test_a_peer_that_violates_the_protocol_is_lost(tmp_path, answer, words):
    with scripted(tmp_path / "s", welcome(), answer) as address:
        server = RemoteServer(address)
        with pytest.raises(ServerLost, match=words) as error:
            server.step(1)
        assert f"lost the server at unix://{tmp_path}/s" in str(error.value)
        assert "reset() reconnects" in str(error.value)
        with pytest.raises(ServerLost, match=r"is not connected: .* Call reset"):
            server.step(1)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (welcome(version=2), ServerLost, "it uses version 2 of the protocol, this client version 1. Use the same"),
        (welcome(version=...), ServerLost, "it uses version None"),
        ({"type": "error", "kind": "version", "message": "only 9"}, ServerLost, r"\(version\): only 9. Use the same"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", ServerLost, "it violated the protocol"),
        (welcome(observation_space={"type": "Graph"}), ServerError, "observation_space: unknown space type 'Graph'"),
        (welcome(metadata=5), ServerError, "metadata: expected a map, got 5"),
        (welcome(action_space=...), ServerError, "action_space: unknown space type None"),
    ],
)
def test_an_unusable_welcome_is_an_error_with_the_reason(tmp_path, answer, kind, words):
    with scripted(tmp_path / "s", answer) as address, pytest.raises(kind, match=words):
        RemoteServer(address)


def test_a_client_of_another_version_gets_an_error(tmp_path):
    with serving(Walker, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        client.send({"type": "hello", "version": 99, "name": "from the future"})
        answer = client.receive()
        assert (answer["kind"], "uses version 1" in answer["message"]) == ("version", True)
        with pytest.raises(EOFError):
            client.receive()


# Slow, hanging and dead servers


def test_a_slow_step_sends_heartbeats_and_then_its_result(tmp_path):
    walker = BlockingWalker()
    with serving(lambda: walker, f"unix://{tmp_path}/s") as server, raw(server.address) as client:
        client.send({"type": "hello", "version": 1, "name": "test", "heartbeat_s": 0.05})
        while (answer := client.receive())["type"] == "pong":
            pass
        assert answer["heartbeat_s"] == 0.05
        client.send({"type": "reset", "seed": 1, "options": None})
        while client.receive()["type"] == "pong":
            pass
        client.send({"type": "step", "action": 2})
        assert [client.receive()["type"] for _ in range(3)] == ["pong"] * 3
        walker.proceed.set()
        while (answer := client.receive())["type"] == "pong":
            pass
        assert answer["type"] == "result"


def test_heartbeats_are_skipped(tmp_path):
    pongs = frame({"type": "pong"}) * 3
    with scripted(tmp_path / "s", pongs + frame(welcome()), pongs + frame(result())) as address:
        server = RemoteServer(address)
        assert server.step(1)[1] == 1.0
        server.close()


def test_a_server_that_hangs_is_lost_at_the_deadline_despite_heartbeats(tmp_path):
    walker = BlockingWalker()
    with serving(lambda: walker, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address, timeout_s=1, heartbeat_s=0.6)
        there.reset()
        with pytest.raises(ServerLost, match=r"no response to 'step' within 1 s \(timeout_s\)"):
            there.step(1)
        walker.proceed.set()


def test_a_server_without_heartbeats_is_lost_before_the_deadline(tmp_path):
    with scripted(tmp_path / "s", welcome(heartbeat_s=0.05), frame({"type": "pong"})) as address:
        server = RemoteServer(address, timeout_s=60)
        with pytest.raises(ServerLost, match=r"no heartbeat for 0.15 s during 'step'"):
            server.step(1)


def test_an_incomplete_response_is_lost_at_the_deadline(tmp_path):
    with scripted(tmp_path / "s", welcome(), frame(result())[:20]) as address:
        server = RemoteServer(address, timeout_s=1)
        with pytest.raises(ServerLost, match="no response to 'step' within"):
            server.step(1)


def test_a_peer_that_sends_no_welcome_is_lost(tmp_path):
    with scripted(tmp_path / "s") as address, pytest.raises(ServerLost, match=r"no response to 'hello' within 0.2 s"):
        RemoteServer(address, timeout_s=0.2)


@pytest.mark.parametrize("where", ["unix://{}/nobody", "tcp://127.0.0.1:1"])
def test_an_unreachable_server_is_lost_after_the_connect_timeout(tmp_path, where):
    with pytest.raises(ServerLost, match="cannot connect"):
        RemoteServer(where.format(tmp_path), connect_timeout_s=0.1)


def test_an_interrupted_call_leaves_no_response_for_the_next_one(tmp_path, monkeypatch):
    with serving(Walker, f"unix://{tmp_path}/s") as server:
        there = RemoteServer(server.address)
        there.reset()

        def interrupted(until_s):
            raise KeyboardInterrupt

        monkeypatch.setattr(there._channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            there.step(2)
        with pytest.raises(ServerLost, match="a call was interrupted"):
            there.step(2)
        assert there.reset()[0].tolist() == [0, 5]
        there.close()


# Reconnecting


def test_reset_reconnects_to_a_restarted_server(tmp_path):
    address = f"unix://{tmp_path}/s"
    with serving(Walker, address):
        there = RemoteServer(address)
        there.reset()
        there.step(1)
    with pytest.raises(ServerLost):
        there.step(1)
    with serving(Walker, address):
        assert there.reset()[0].tolist() == [0, 5]
        assert there.step(2)[0].tolist() == [1, 4]
    with serving(Walker, address):
        # Between two episodes, so the caller does not notice.
        assert there.reset()[0].tolist() == [0, 5]
        there.close()


def test_reset_waits_for_a_server_that_is_starting(tmp_path):
    address, done = f"unix://{tmp_path}/s", threading.Event()
    with serving(Walker, address):
        there = RemoteServer(address, connect_timeout_s=30)

    def come_back():
        time.sleep(0.2)
        with serving(Walker, address):
            done.wait(30)

    thread = threading.Thread(target=come_back)
    thread.start()
    assert there.reset()[0].tolist() == [0, 5]
    there.close()
    done.set()
    thread.join()


def test_a_restarted_server_with_other_spaces_is_lost(tmp_path):
    address = f"unix://{tmp_path}/s"
    with serving(Walker, address):
        there = RemoteServer(address)
    with serving(Large, address), pytest.raises(ServerLost, match="its spaces have changed"):
        there.reset()


def test_a_reset_that_fails_on_a_new_connection_is_not_retried(tmp_path):
    with scripted(tmp_path / "s", welcome(), None) as address:
        there = RemoteServer(address, timeout_s=1, connect_timeout_s=0.1)
        with pytest.raises(ServerLost):
            there.reset()
    assert there.observation_space == BOX
