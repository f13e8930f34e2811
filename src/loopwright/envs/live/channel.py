"""Channels: frames over a stream socket, and the addresses at which one is found."""

import ipaddress
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from urllib.parse import urlsplit

from loopwright.core.errors import LoopwrightError
from loopwright.envs.live.wire import HEADER_BYTES, Framer, Message, body_bytes, unpack

_PIECE_BYTES = 65536
_BACKLOG = 128


class AddressError(LoopwrightError, ValueError):
    """An address that cannot be used: misspelt, taken, or open to more people than was said."""


@dataclass(frozen=True)
class Address:
    """`unix:///path` or `tcp://host:port`."""

    path: Path | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Understand an address; an AddressError says how to write one."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressError(f"{text!r} is no address: {error}. {_FORMS}") from None
        if parts.scheme == "unix" and not parts.netloc and Path(parts.path).name:
            return cls(Path(text.removeprefix("unix://")))
        if parts.scheme == "tcp" and host and port is not None and not parts.path.strip("/"):
            return cls(None, host, port)
        raise AddressError(f"{text!r} is no address. {_FORMS}")

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket, or an OSError."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, *, public: bool) -> socket.socket:
        """A listening socket; an AddressError if it is taken, or open to the network and that was not said."""
        try:
            return self._listen_tcp(public=public) if self.path is None else self._listen_unix(self.path)
        except OSError as error:
            raise AddressError(
                f"cannot listen at {self}: {error.strerror or error}. Choose another address."
            ) from error

    def _listen_tcp(self, *, public: bool) -> socket.socket:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        if not public and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            raise AddressError(
                f"{self} can be reached from other machines, and whoever connects can step the environment: there is "
                "no password. Serve at 127.0.0.1 or at unix:///path, or say that it is meant: --public (public=True)."
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _listen_unix(self, path: Path) -> socket.socket:
        with _locked(path.parent):
            self._clear(path)
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(path))
                # Before it listens nobody can connect, so that at no moment it is open to others.
                path.chmod(0o600)
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                raise
        return listener

    def _clear(self, path: Path) -> None:
        """Remove the socket file of a server that is no more; anything else is left alone."""
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise AddressError(f"cannot listen at {self}: there is a file that is no socket. Choose another path.")
        try:
            self.connect(1.0).close()
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressError(f"cannot listen at {self}: somebody serves there already. Choose another path.")


_FORMS = "Write 'unix:///path/to.sock' or 'tcp://host:port'."


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One at a time: of two servers that find the same dead socket, one must not remove the other's new one."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        flock(opened, LOCK_EX)
        yield
    finally:
        os.close(opened)


class Channel:
    """Sends and receives messages on a connected socket. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that vanished without a word is noticed in minutes, not never.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._socket = connection
        self._framer = Framer()
        self._rest = b""
        self._patience_s = self._set_s = math.inf

    def be_patient(self, seconds: float) -> None:
        """How long the other side may say nothing while something is expected of it: TimeoutError after that."""
        self._patience_s = seconds
        self._set_timeout(seconds)

    def _set_timeout(self, seconds: float) -> None:
        # The kernel's own timeouts, for Python's cost a second system call each time.
        whole, part = (0, 0) if seconds == math.inf else divmod(max(1, int(seconds * 1e6)), 1_000_000)
        timeval = struct.pack("@ll", whole, part)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._set_s = seconds

    def send(self, message: Message) -> None:
        """Send a message. Unsendable means that nothing was sent."""
        data = self._framer.frame(message)
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise TimeoutError("the other side takes no more") from None

    def receive(self, until_s: float = math.inf) -> Message:
        """The next message. TimeoutError after the patience or at `until_s` (monotonic), EOFError when it hung up.

        The first piece is waited for as long as the patience, which must end no later than `until_s`.
        """
        if self._rest:
            return self.receive_on(until_s)
        try:
            data = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            raise TimeoutError("the other side is silent") from None
        if not data:
            raise EOFError("it hung up")
        # As good as always: one frame, in one piece.
        if len(data) > HEADER_BYTES and len(data) == HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big"):
            return unpack(data[HEADER_BYTES:])
        self._rest = data
        return self.receive_on(until_s)

    def receive_on(self, until_s: float) -> Message:
        """The same with any number of pieces, when time has passed since the patience began."""
        held, self._rest = bytearray(self._rest), b""
        try:
            self._fill(held, HEADER_BYTES, until_s)
            end = HEADER_BYTES + body_bytes(held)
            self._fill(held, end, until_s)
        finally:
            if self._set_s != self._patience_s:
                self._set_timeout(self._patience_s)
        self._rest = bytes(held[end:])
        with memoryview(held) as view:
            return unpack(view[HEADER_BYTES:end])

    def _fill(self, held: bytearray, size_bytes: int, until_s: float) -> None:
        """Have so many bytes at least."""
        filled = len(held)
        held.extend(bytes(max(0, size_bytes - filled)))
        with memoryview(held) as view:
            while filled < size_bytes:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the deadline has passed")
                if left_s < self._set_s:
                    self._set_timeout(left_s)
                try:
                    count = self._socket.recv_into(view[filled:])
                except BlockingIOError:
                    raise TimeoutError("the other side is silent") from None
                if not count:
                    raise EOFError("it hung up in the middle of a frame" if filled else "it hung up")
                filled += count

    def hang_up(self) -> None:
        """Wake whoever receives or sends on it, here and there; from any thread."""
        # An error means that it has hung up already.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
