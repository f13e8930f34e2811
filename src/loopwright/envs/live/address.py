"""Addresses of live servers: Unix sockets and TCP ports."""

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from urllib.parse import urlsplit

from loopwright.core.errors import LoopwrightError

_BACKLOG = 128
_ADDRESS_FORMS = "Write 'unix:///path/to.sock' or 'tcp://host:port'."


class AddressError(LoopwrightError, ValueError):
    """An address that cannot be used: malformed, in use, or reachable from the network without `public`."""


@dataclass(frozen=True)
class Address:
    """`unix:///path` or `tcp://host:port`."""

    path: Path | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address. An AddressError says how to write one."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressError(f"{text!r} is not an address: {error}. {_ADDRESS_FORMS}") from None
        if parts.scheme == "unix" and not parts.netloc and Path(parts.path).name:
            return cls(Path(text.removeprefix("unix://")))
        if parts.scheme == "tcp" and host and port is not None and not parts.path.strip("/"):
            return cls(None, host, port)
        raise AddressError(f"{text!r} is not an address. {_ADDRESS_FORMS}")

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError."""
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
        """A listening socket. Raises AddressError if the address is in use, or is not local and `public` is false."""
        try:
            return self._listen_tcp(public=public) if self.path is None else self._listen_unix(self.path)
        except OSError as error:
            raise AddressError(
                f"cannot listen at {self}: {error.strerror or error}. Choose another address."
            ) from error

    def _listen_tcp(self, *, public: bool) -> socket.socket:
        candidates = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = candidates[0]
        if not public and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise AddressError(
                f"{self} can be reached from other machines, and every client can step the environment: there is no "
                "password. Serve at 127.0.0.1 or unix:///path, or allow it with --public (public=True)."
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _listen_unix(self, path: Path) -> socket.socket:
        # Lock the directory: of two servers that find the same stale socket, one must not remove the other's new one.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            flock(directory, LOCK_EX)
            self._remove_stale_socket(path)
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(path))
                # Set the mode before listening, so that the socket is never open to other users.
                path.chmod(0o600)
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                raise
        finally:
            os.close(directory)
        return listener

    def _remove_stale_socket(self, path: Path) -> None:
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise AddressError(f"cannot listen at {self}: the file exists and is not a socket. Choose another path.")
        try:
            self.connect(1.0).close()
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressError(f"cannot listen at {self}: another server uses it. Choose another path.")
