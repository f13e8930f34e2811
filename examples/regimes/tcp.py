"""A bulk transfer over a lossy link between two network namespaces, which vanish with this process.

The link is a veth pair: a token bucket (`tc tbf`) is its bottleneck and an nft rule drops packets at random. The agent
chooses congestion control, send buffer, write size and number of connections.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache

import loopwright

_CLONE_NEWNET = 0x40000000
_HERE, _THERE, _PORT = "10.77.0.1", "10.77.0.2", 7000
_libc = ctypes.CDLL(None, use_errno=True)


def transfer(
    drop_percent: float,
    rate_mbit: int,
    congestion: str,
    send_buffer_kib: int,
    chunk_kib: int,
    connections: int,
    delay_price: float,
    transfer_s: float = 0.2,
) -> dict[str, float]:
    """Send for `transfer_s` seconds over a link with this loss and rate, and measure what arrives."""
    link = _link()
    link.set(drop_percent, rate_mbit)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(link.socket(link.there))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_THERE, _PORT))
        listener.listen(connections)
        pairs = []
        for _ in range(connections):
            sender = stack.enter_context(link.socket(link.here))
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            # The kernel doubles this value for its own overhead.
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_kib * 1024 // 2)
            sender.settimeout(5)
            sender.connect((_THERE, _PORT))
            pairs.append((sender, stack.enter_context(listener.accept()[0])))
        metrics = _send(pairs, bytes(chunk_kib * 1024), transfer_s)
    used = metrics["goodput_mbps"] / rate_mbit
    return {"utility": used - delay_price * metrics["rtt_ms"], "utilisation": used, **metrics}


def _send(pairs: list[tuple[socket.socket, socket.socket]], chunk: bytes, transfer_s: float) -> dict[str, float]:
    """Write and read in threads until the time is up, and count the bytes that arrived by then."""
    received_bytes, deadline_s = [0] * len(pairs), time.perf_counter() + transfer_s

    def write(sender: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while time.perf_counter() < deadline_s:
                sender.sendall(chunk)

    def read(index: int, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (left_s := deadline_s - time.perf_counter()) > 0:
                receiver.settimeout(left_s)
                received_bytes[index] += len(receiver.recv(1 << 20))

    threads = [threading.Thread(target=write, args=(sender,)) for sender, _ in pairs]
    threads += [threading.Thread(target=read, args=(index, pair[1])) for index, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, deadline_s - time.perf_counter()))
    rtt_ms, retransmits = _tcp_info([sender for sender, _ in pairs])
    for sender, receiver in pairs:
        # Drop what is still in flight and unblock the writers.
        with contextlib.suppress(OSError):
            sender.shutdown(socket.SHUT_RDWR)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for thread in threads:
        thread.join()
    return {"goodput_mbps": sum(received_bytes) * 8e-6 / transfer_s, "rtt_ms": rtt_ms, "retransmits": retransmits}


def _tcp_info(senders: list[socket.socket]) -> tuple[float, float]:
    """The mean smoothed round trip in ms, and the retransmitted segments (linux/tcp.h, struct tcp_info)."""
    infos = [sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104) for sender in senders]
    at = lambda info, offset: int.from_bytes(info[offset : offset + 4], "little")  # noqa: E731
    return sum(at(info, 68) for info in infos) / len(infos) / 1000, float(sum(at(info, 100) for info in infos))


class Link:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self._original = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.here, self.there = self._namespace(), self._namespace()
        self._current: tuple[float, int] | None = None
        far = f"/proc/{os.getpid()}/fd/{self.there}"
        self._run(self.here, f"ip link add link0 type veth peer name link1 netns {far}")
        for namespace, device, address in ((self.here, "link0", _HERE), (self.there, "link1", _THERE)):
            self._run(namespace, f"ip address add {address}/24 dev {device}")
            # One packet is one segment, as on a wire: a drop must not take 64 KiB at once.
            self._run(namespace, f"ip link set {device} up gso_max_segs 1")

    def set(self, drop_percent: float, rate_mbit: int) -> None:
        """Set the loss and the rate of the link."""
        if self._current == (drop_percent, rate_mbit):
            return
        self._current = drop_percent, rate_mbit
        self._run(self.here, f"tc qdisc replace dev link0 root tbf rate {rate_mbit}mbit burst 8kb limit 128kb")
        # Only packets with data: a lost handshake would cost a second and distort the measurement.
        drop = f"ip length > 100 numgen random mod 10000 < {round(drop_percent * 100)} drop"
        self._run(
            self.there,
            "nft -f -",
            "add table ip loss\ndelete table ip loss\ntable ip loss {\n chain in {\n"
            f"  type filter hook input priority 0; policy accept;\n  {drop}\n }}\n}}\n",
        )

    def socket(self, namespace: int) -> socket.socket:
        """A socket in a namespace. Any thread may use it."""
        with self._inside(namespace):
            return socket.socket()

    def _run(self, namespace: int, command: str, text: str = "") -> None:
        with self._inside(namespace):
            done = subprocess.run(command.split(), input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")

    def _namespace(self) -> int:
        """The file descriptor of a new network namespace, which exists as long as the descriptor is open."""
        with self._inside(self._original):
            _check(_libc.unshare(_CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    @contextlib.contextmanager
    def _inside(self, namespace: int) -> Iterator[None]:
        """Move this thread, and the processes it starts, into a namespace temporarily."""
        _check(_libc.setns(namespace, _CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(self._original, _CLONE_NEWNET))


@cache
def _link() -> Link:
    """The link of this process, created by its first transfer."""
    if problem := missing():
        raise RuntimeError(problem)
    return Link()


def missing() -> str | None:
    """What this machine or user lacks, and how to fix it."""
    if os.geteuid() != 0:
        return "this example creates network namespaces, which needs root: run it with sudo"
    tools = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"{', '.join(tools)} not found: apt-get install -y iproute2 nftables" if tools else None


class CheckRequirements(loopwright.Observer):
    """Ends the run before its first trial if a requirement is missing, instead of failing every trial."""

    def before(self, trial: loopwright.Trial) -> None:
        """Exit with a message if something is missing."""
        del trial
        if problem := missing():
            sys.exit(f"error: {problem}")


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
