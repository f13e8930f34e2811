"""Serving: any environment behind a socket, one instance and one thread per client.

from loopwright.envs.live.serve import serve

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

from loopwright.envs.live.answer import flag, real
from loopwright.envs.live.channel import Address, Channel
from loopwright.envs.live.reading import reader
from loopwright.envs.live.server import GymServer
from loopwright.envs.live.wire import VERSION, Message, Reader, Unsendable, WireError, describe, described, revived

_log = logging.getLogger(__name__)
_HELLO_S = 30.0
_GRACE_S = 5.0
_FASTEST_BEAT_S, _SLOWEST_BEAT_S = 0.02, 3600.0
_PAUSE_S = 0.5


def serve(
    make: Callable[[], GymServer],
    address: str,
    *,
    public: bool = False,
    ready: Callable[[str], None] | None = None,
) -> int | None:
    """Serve environments until SIGINT or SIGTERM, whose number is returned; a second one ends the process at once.

    Each client gets its own `make()`, in its own thread. `ready` is told the address once clients can connect.
    A TCP address that other machines can reach needs `public=True`.
    """
    with EnvServer(make, address, public=public) as server, _ended_by_signals(server) as heard:
        if ready is not None:
            ready(server.address)
        server.run()
        return heard[0] if heard else None


@contextmanager
def _ended_by_signals(server: "EnvServer") -> Iterator[list[int]]:
    heard: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if heard:
            os._exit(128 + number)
        heard.append(number)
        server.stop()

    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EnvServer:
    """Listens from the start; `run()` takes clients until `stop()`, which any thread may call."""

    def __init__(self, make: Callable[[], GymServer], address: str, *, public: bool = False) -> None:
        self._make = make
        wanted = Address.parse(address)
        self._listener = wanted.listen(public=public)
        self._listener.setblocking(False)
        self._file = (wanted.path, wanted.path.stat().st_ino) if wanted.path is not None else None
        # Port 0 means any: tell which one it became.
        port = self._listener.getsockname()[1] if wanted.path is None else 0
        self.address = str(Address(wanted.path, wanted.host, port))
        self._wake, self._woken = socket.socketpair()
        self._clients: set[_Client] = set()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Take clients until somebody calls `stop()`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                selector.select()
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    # Out of file descriptors, as a rule: those who are here go on, and the next one has to wait.
                    _log.warning("cannot take another client: %s", error)
                    self._stopping.wait(_PAUSE_S)
                    continue
                client = _Client(Channel(connection), self._make, self._clients.discard)
                self._clients.add(client)
                client.start()

    def stop(self) -> None:
        """Take no more clients and return from `run()`."""
        self._stopping.set()
        with suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        """Hang up on everybody and wait a little for their environments to close."""
        self.stop()
        self._listener.close()
        if self._file is not None:
            path, inode = self._file
            # Somebody else may serve at this path by now.
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        leaving, until_s = list(self._clients), time.monotonic() + _GRACE_S
        for client in leaving:
            client.leave()
        for client in leaving:
            client.join(max(0.0, until_s - time.monotonic()))
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> "EnvServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Client(threading.Thread):
    """One client and its environment. A second thread gives signs of life while the environment works."""

    def __init__(self, channel: Channel, make: Callable[[], GymServer], gone: Callable[["_Client"], None]) -> None:
        # A step that never returns must not keep the process from ending.
        super().__init__(name="loopwright-client", daemon=True)
        self._channel, self._make, self._gone = channel, make, gone
        self._env: GymServer | None = None
        self._sending, self._busy, self._over = threading.Lock(), False, threading.Event()

    def leave(self) -> None:
        """Hang up; the thread ends after the step in progress."""
        self._over.set()
        self._channel.hang_up()

    def run(self) -> None:
        """Greet, answer, and clean up, however the client went away."""
        try:
            self._greet()
            self._answer_all()
        except (OSError, EOFError):
            pass  # The client is gone; that is its right.
        except WireError as error:
            self._refuse("malformed", f"{error}")
        finally:
            self._over.set()
            self._close()
            self._channel.close()
            self._gone(self)

    def _greet(self) -> None:
        self._channel.be_patient(_HELLO_S)
        hello = self._channel.receive()
        if hello["type"] != "hello":
            raise WireError(f"{hello['type']!r} before 'hello'")
        if hello.get("version") != VERSION:
            message = f"this server speaks version {VERSION} of the protocol, the client {hello.get('version')!r}"
            self._refuse("version", message)
            raise EOFError
        self._channel.be_patient(float("inf"))
        self._beat_s = self._start_beating(hello.get("heartbeat_s"))
        self._send(self._work(self._welcome, hello))
        if self._env is None:
            raise EOFError

    def _start_beating(self, asked: Any) -> float:
        beat_s = (
            min(max(_FASTEST_BEAT_S, float(asked)), _SLOWEST_BEAT_S)
            if isinstance(asked, int | float) and asked > 0
            else 0.0
        )
        if beat_s:
            threading.Thread(target=self._keep_beating, args=(beat_s,), name="loopwright-pulse", daemon=True).start()
        return beat_s

    def _keep_beating(self, every_s: float) -> None:
        """While a request is worked on, say so; at other times nothing, for the client is not listening."""
        with suppress(OSError, ValueError):
            while not self._over.wait(every_s):
                with self._sending:
                    if self._busy:
                        self._channel.send({"type": "pong"})

    def _welcome(self, _: Message) -> Message:
        env = self._make()
        try:
            observation_space, action_space = describe(env.observation_space), describe(env.action_space)
            self._read: Reader = reader(env.action_space)
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
            "metadata": described(getattr(env, "metadata", None) or {}),
            "heartbeat_s": self._beat_s,
        }

    def _answer_all(self) -> None:
        channel = self._channel
        while True:
            request = channel.receive()
            kind = request["type"]
            if kind == "step":
                self._send(self._work(self._step, request))
            elif kind == "reset":
                self._send(self._work(self._reset, request))
            elif kind == "ping":
                self._send({"type": "pong"})
            elif kind == "close":
                return
            else:
                raise WireError(f"a request of the unknown type {kind!r}")

    def _work(self, work: Callable[[Message], Message], request: Message) -> Message:
        self._busy = True
        try:
            return work(request)
        except _Unreadable as error:
            return {"type": "error", "kind": "action", "message": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001  Whatever an environment raises is told to its client.
            _log.warning("an environment failed", exc_info=True)
            return {"type": "error", "kind": "environment", "message": f"{type(error).__name__}: {error}"}

    def _reset(self, request: Message) -> Message:
        assert self._env is not None  # noqa: S101
        observation, info = self._env.reset(
            seed=request.get("seed"), options=revived(request.get("options"), "options")
        )
        return {"type": "state", "obs": observation, "info": info}

    def _step(self, request: Message) -> Message:
        assert self._env is not None  # noqa: S101
        try:
            action = self._read(request.get("action"), "action")
        except WireError as error:
            raise _Unreadable(str(error)) from None
        observation, reward, terminated, truncated, info = self._env.step(action)
        return {
            "type": "result",
            "obs": observation,
            "reward": reward if type(reward) is float else real(reward),
            "terminated": terminated if type(terminated) is bool else flag("terminated", terminated),
            "truncated": truncated if type(truncated) is bool else flag("truncated", truncated),
            "info": info,
        }

    def _send(self, message: Message) -> None:
        with self._sending:
            self._busy = False
            try:
                self._channel.send(message)
                return
            except Unsendable:
                # Info may hold anything; the client gets the text of what has no form on the wire.
                message = {**message, "info": described(message.get("info"))}
            try:
                self._channel.send(message)
            except Unsendable as error:
                self._channel.send({"type": "error", "kind": "environment", "message": f"it cannot be sent: {error}"})

    def _refuse(self, kind: str, message: str) -> None:
        with suppress(OSError), self._sending:
            self._channel.send({"type": "error", "kind": kind, "message": message})

    def _close(self) -> None:
        try:
            if self._env is not None:
                self._env.close()
        except Exception:  # noqa: BLE001  There is nobody left to tell but the log.
            _log.warning("an environment failed to close", exc_info=True)


class _Unreadable(Exception):
    """An action that is none of the declared space."""
