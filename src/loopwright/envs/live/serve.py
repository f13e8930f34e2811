"""The server of the live protocol: any environment behind a socket, one instance and one thread per client.

from loopwright.envs import serve

serve(MySimulator, "unix:///run/sim.sock")
"""

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType
from typing import Any

from loopwright.envs.live.address import Address
from loopwright.envs.live.channel import Channel
from loopwright.envs.live.samples import Reader, reader
from loopwright.envs.live.server import GymServer, read_flag, read_reward
from loopwright.envs.live.wire import (
    VERSION,
    Message,
    Unsendable,
    WireError,
    decode_arrays,
    encode_space,
    make_sendable,
)
from loopwright.execution.local.processes import IGNORED

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0
_MIN_HEARTBEAT_S, _MAX_HEARTBEAT_S = 0.02, 3600.0
_ACCEPT_PAUSE_S = 0.5


def serve(
    make: Callable[[], GymServer],
    address: str,
    *,
    public: bool = False,
    ready: Callable[[str], None] | None = None,
) -> int | None:
    """Serve environments until SIGINT or SIGTERM and return its number. A second signal ends the process at once.

    Each client gets its own `make()` in its own thread. `ready` is called with the address once clients can connect.
    A TCP address that other machines can reach needs `public=True`.
    """
    with EnvServer(make, address, public=public) as server, _stop_on_signal(server) as signals:
        if ready is not None:
            ready(server.address)
        server.run()
        return signals[0] if signals else None


@contextmanager
def _stop_on_signal(server: "EnvServer") -> Iterator[list[int]]:
    signals: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        server.stop()

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) not in IGNORED]
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class EnvServer:
    """Listens from the start. `run()` accepts clients until `stop()`, which any thread may call."""

    def __init__(self, make: Callable[[], GymServer], address: str, *, public: bool = False) -> None:
        self._make = make
        parsed = Address.parse(address)
        self._listener = parsed.listen(public=public)
        self._listener.setblocking(False)
        self._socket_file = (parsed.path, parsed.path.stat().st_ino) if parsed.path is not None else None
        # Port 0 means any free port: report the actual one.
        port = self._listener.getsockname()[1] if parsed.path is None else 0
        self.address = str(Address(parsed.path, parsed.host, port))
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._clients: set[_Client] = set()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Accept clients until `stop()` is called."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not self._stopping.is_set():
                selector.select()
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    # Usually out of file descriptors: current clients continue, new ones have to wait.
                    _log.warning("cannot accept another client: %s", error)
                    self._stopping.wait(_ACCEPT_PAUSE_S)
                    continue
                client = _Client(Channel(connection), self._make, self._clients.discard)
                self._clients.add(client)
                client.start()

    def stop(self) -> None:
        """Accept no more clients and return from `run()`."""
        self._stopping.set()
        with suppress(OSError):
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Disconnect all clients and wait briefly for their environments to close."""
        self.stop()
        self._listener.close()
        if self._socket_file is not None:
            path, inode = self._socket_file
            # Another server may use this path by now.
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        clients, deadline_s = list(self._clients), time.monotonic() + _CLOSE_TIMEOUT_S
        for client in clients:
            client.disconnect()
        for client in clients:
            client.join(max(0.0, deadline_s - time.monotonic()))
        self._wake_sender.close()
        self._wake_receiver.close()

    def __enter__(self) -> "EnvServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Client(threading.Thread):
    """One client and its environment. A second thread sends heartbeats while the environment works."""

    def __init__(self, channel: Channel, make: Callable[[], GymServer], on_exit: Callable[["_Client"], None]) -> None:
        # A daemon, so that a step that never returns does not keep the process from ending.
        super().__init__(name="loopwright-client", daemon=True)
        self._channel, self._make, self._on_exit = channel, make, on_exit
        self._env: GymServer | None = None
        self._send_lock, self._busy, self._closed = threading.Lock(), False, threading.Event()

    def disconnect(self) -> None:
        """Close the connection. The thread ends after the step in progress."""
        self._closed.set()
        self._channel.shutdown()

    def run(self) -> None:
        """Handle requests until the client leaves, then clean up."""
        try:
            self._greet()
            self._handle_requests()
        except (OSError, EOFError):
            pass  # the client is gone
        except WireError as error:
            self._send_error("malformed", str(error))
        finally:
            self._closed.set()
            try:
                if self._env is not None:
                    self._env.close()
            except Exception:  # noqa: BLE001  there is no client left to report it to
                _log.warning("an environment failed to close", exc_info=True)
            self._channel.close()
            self._on_exit(self)

    def _greet(self) -> None:
        self._channel.set_timeout(_HELLO_TIMEOUT_S)
        hello = self._channel.receive()
        if hello["type"] != "hello":
            raise WireError(f"{hello['type']!r} before 'hello'")
        if hello.get("version") != VERSION:
            message = f"this server uses version {VERSION} of the protocol, the client {hello.get('version')!r}"
            self._send_error("version", message)
            raise EOFError
        self._channel.set_timeout(float("inf"))
        interval_s = hello.get("heartbeat_s")
        if isinstance(interval_s, int | float) and interval_s > 0:
            self._heartbeat_s = min(max(_MIN_HEARTBEAT_S, float(interval_s)), _MAX_HEARTBEAT_S)
            threading.Thread(target=self._send_heartbeats, name="loopwright-heartbeat", daemon=True).start()
        else:
            self._heartbeat_s = 0.0
        self._send(self._call(self._welcome, hello))
        if self._env is None:
            raise EOFError

    def _send_heartbeats(self) -> None:
        """Send `pong` while a request is in progress. At other times the client does not listen."""
        with suppress(OSError, ValueError):
            while not self._closed.wait(self._heartbeat_s):
                with self._send_lock:
                    if self._busy:
                        self._channel.send({"type": "pong"})

    def _welcome(self, _: Message) -> Message:
        env = self._make()
        try:
            observation_space, action_space = encode_space(env.observation_space), encode_space(env.action_space)
            self._read_action: Reader = reader(env.action_space)
        except BaseException:
            env.close()
            raise
        self._env = env
        return {
            "type": "welcome",
            "version": VERSION,
            "name": f"loopwright {version('loopwright')}",
            "observation_space": observation_space,
            "action_space": action_space,
            "metadata": make_sendable(getattr(env, "metadata", None) or {}),
            "heartbeat_s": self._heartbeat_s,
        }

    def _handle_requests(self) -> None:
        channel = self._channel
        while True:
            request = channel.receive()
            kind = request["type"]
            if kind == "step":
                self._send(self._call(self._step, request))
            elif kind == "reset":
                self._send(self._call(self._reset, request))
            elif kind == "ping":
                self._send({"type": "pong"})
            elif kind == "close":
                return
            else:
                raise WireError(f"unknown request type {kind!r}")

    def _call(self, handler: Callable[[Message], Message], request: Message) -> Message:
        """The response of a handler, or an error message for whatever the environment raises."""
        self._busy = True
        try:
            return handler(request)
        except _UnreadableAction as error:
            return {"type": "error", "kind": "action", "message": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001
            _log.warning("an environment failed", exc_info=True)
            return {"type": "error", "kind": "environment", "message": f"{type(error).__name__}: {error}"}

    def _reset(self, request: Message) -> Message:
        assert self._env is not None  # noqa: S101
        options: dict[str, Any] | None = decode_arrays(request.get("options"), "options")
        observation, info = self._env.reset(seed=request.get("seed"), options=options)
        return {"type": "state", "obs": observation, "info": info}

    def _step(self, request: Message) -> Message:
        assert self._env is not None  # noqa: S101
        try:
            action = self._read_action(request.get("action"), "action")
        except WireError as error:
            raise _UnreadableAction(str(error)) from None
        observation, reward, terminated, truncated, info = self._env.step(action)
        return {
            "type": "result",
            "obs": observation,
            "reward": reward if type(reward) is float else read_reward(reward),
            "terminated": terminated if type(terminated) is bool else read_flag("terminated", terminated),
            "truncated": truncated if type(truncated) is bool else read_flag("truncated", truncated),
            "info": info,
        }

    def _send(self, message: Message) -> None:
        with self._send_lock:
            self._busy = False
            try:
                self._channel.send(message)
                return
            except Unsendable:
                # `info` may hold anything: replace what cannot be encoded by its repr.
                message = {**message, "info": make_sendable(message.get("info"))}
            try:
                self._channel.send(message)
            except Unsendable as error:
                reason = f"the response cannot be sent: {error}"
                self._channel.send({"type": "error", "kind": "environment", "message": reason})

    def _send_error(self, kind: str, message: str) -> None:
        with suppress(OSError), self._send_lock:
            self._channel.send({"type": "error", "kind": kind, "message": message})


class _UnreadableAction(Exception):
    """An action that is not a value of the declared space."""
