"""Environments to serve, and peers that send exactly the bytes that a test gives them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from loopwright.envs.live.address import Address
from loopwright.envs.live.channel import Channel
from loopwright.envs.live.serve import EnvServer
from loopwright.envs.live.wire import Message, encode_space, frame

BOX = spaces.Box(-10, 10, (2,), np.float32)


class Walker:
    """Walks along a line. Has all members of a server and inherits nothing."""

    observation_space = BOX
    action_space = spaces.Discrete(3)
    metadata: ClassVar = {"render_modes": []}

    def __init__(self, start: float = 0.0) -> None:
        self.start, self.closed = start, threading.Event()

    def reset(self, *, seed=None, options=None):
        self.position, self.left = (options or {}).get("start", self.start), 5
        return self._observation(), {"seed": seed}

    def step(self, action):
        self.position += int(action) - 1
        self.left -= 1
        return self._observation(), float(-abs(self.position)), self.position >= 3, self.left == 0, {}

    def close(self) -> None:
        self.closed.set()

    def _observation(self):
        return np.array([self.position, self.left], np.float32)


class BlockingWalker(Walker):
    """A step waits until the test sets `proceed`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.proceed = threading.Event(), threading.Event()

    def step(self, action):
        self.entered.set()
        assert self.proceed.wait(30)
        return super().step(action)


@contextmanager
def serving(make, address: str) -> Iterator[EnvServer]:
    """Run a server in a thread."""
    with EnvServer(make, address) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def welcome(**changes) -> Message:
    """A valid `welcome`, or one with changes."""
    greeting = {
        "type": "welcome",
        "version": 1,
        "observation_space": encode_space(BOX),
        "action_space": encode_space(spaces.Discrete(3)),
        **changes,
    }
    return {key: value for key, value in greeting.items() if value is not ...}


def result(**changes) -> Message:
    """A valid `result`, or one with changes."""
    good = {"type": "result", "obs": [0.5, 1], "reward": 1.0, "terminated": False, "truncated": False, "info": {}}
    return {key: value for key, value in {**good, **changes}.items() if value is not ...}


@contextmanager
def scripted(path, *answers: Message | bytes | None) -> Iterator[str]:
    """A peer that responds to the nth request with the nth message or bytes; None closes the connection."""
    address = Address(path)
    listener = address.listen(public=False)
    connections = []

    def play() -> None:
        with suppress(OSError, EOFError):
            connection, _ = listener.accept()
            connections.append(connection)
            channel = Channel(connection)
            for answer in answers:
                channel.receive()
                if answer is None:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                connection.sendall(answer if isinstance(answer, bytes) else frame(answer))
            channel.receive()
            channel.receive()

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield str(address)
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()
        listener.close()


@contextmanager
def raw(address: str) -> Iterator[Channel]:
    """A client without protocol checks."""
    channel = Channel(Address.parse(address).connect(5))
    channel.set_timeout(30)
    try:
        yield channel
    finally:
        channel.close()
