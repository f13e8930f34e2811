"""Sockets: stepping CartPole behind a Unix socket, against a bare client and server that speak the same frames.

The bare pair does what a step cannot do without: pack, send, receive, unpack, step, and make an array of the bytes. It
has no deadlines, no heartbeat, no spaces, no checks, and takes one client.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import msgpack  # type: ignore[import-untyped]
import numpy as np

from benchmarks.measure import Ratio, best_of
from loopwright.envs.live.remote import RemoteServer

ENVIRONMENT = "CartPole-v1"
STEPS, ROUNDS = 2_000, 15
_PIECE_BYTES = 65536

pack = msgpack.Packer().pack


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = pack(message)
    connection.sendall(len(body).to_bytes(4, "big") + body)


def receive(connection: socket.socket) -> dict[str, Any]:
    data = connection.recv(_PIECE_BYTES)
    if not data:
        raise EOFError
    assert len(data) == 4 + int.from_bytes(data[:4], "big")
    message: dict[str, Any] = msgpack.unpackb(data[4:])
    return message


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"nd": "float32", "shape": array.shape, "data": array.tobytes()}


def decoded(message: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(message["data"], np.float32).reshape(message["shape"]).copy()


def bare_server(path: str) -> None:
    """Step one environment for one client, until it hangs up."""
    env = gymnasium.make(ENVIRONMENT)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
    with connection:
        while True:
            try:
                request = receive(connection)
            except EOFError:
                return
            if request["type"] == "reset":
                obs, info = env.reset(seed=request["seed"], options=request["options"])
                send(connection, {"type": "state", "obs": encoded(obs), "info": info})
                continue
            obs, reward, terminated, truncated, info = env.step(request["action"])
            reply = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
            send(connection, {"type": "result", "obs": encoded(obs), **reply})


class BareClient:
    """The least that can be called a client."""

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)

    def reset(self, *, seed: int | None = None) -> tuple[Any, Any]:
        send(self._connection, {"type": "reset", "seed": seed, "options": None})
        reply = receive(self._connection)
        return decoded(reply["obs"]), reply["info"]

    def step(self, action: int) -> tuple[Any, Any, Any, Any, Any]:
        send(self._connection, {"type": "step", "action": action})
        reply = receive(self._connection)
        return decoded(reply["obs"]), reply["reward"], reply["terminated"], reply["truncated"], reply["info"]

    def close(self) -> None:
        self._connection.close()


def walk(client: Any) -> Callable[[], None]:
    """So many steps, with a reset where an episode ends; the same actions for everybody."""

    def steps() -> None:
        client.reset(seed=1)
        for number in range(STEPS):
            _, _, terminated, truncated, _ = client.step(number % 2)
            if terminated or truncated:
                client.reset()

    return steps


@contextmanager
def process(command: list[str], path: Path) -> Iterator[None]:
    """A server in a separate process, from when its socket is there until we are done."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL) as server:
        try:
            while not path.is_socket():
                assert server.poll() is None
                time.sleep(0.05)
            yield
        finally:
            server.terminate()


def run() -> list[Ratio]:
    """Steps per second of both, in turns, each server in a separate process."""
    with tempfile.TemporaryDirectory() as directory:
        bare, ours = Path(directory, "bare.sock"), Path(directory, "ours.sock")
        serve_env = ["-m", "loopwright", "serve-env", f"gymnasium:{ENVIRONMENT}", "--address", f"unix://{ours}"]
        bare_env = ["-c", f"from benchmarks.sockets import bare_server; bare_server({str(bare)!r})"]
        with process(bare_env, bare), process(serve_env, ours):
            time.sleep(0.1)  # From the file's being there to the server's listening.
            clients: list[Any] = [
                RemoteServer(f"unix://{ours}"),
                RemoteServer(f"unix://{ours}", validate=True),
                BareClient(str(bare)),
            ]
            names = ("ours", "checked", "bare")
            best = best_of(ROUNDS, {name: walk(client) for name, client in zip(names, clients, strict=True)})
            for client in clients:
                client.close()
    rate = {name: STEPS / taken_s for name, taken_s in best.items()}
    return [
        Ratio(
            f"sockets: {ENVIRONMENT} over a Unix socket{what}, against a bare client and server",
            rate[name] / rate["bare"],
            0.7,
            at_least=True,
            detail=f"{rate[name]:,.0f} steps/s, bare {rate['bare']:,.0f}",
        )
        for name, what in (("ours", ""), ("checked", ", each answer checked"))
    ]


if __name__ == "__main__":
    print(*run(), sep="\n")
