"""A bulk transfer over a lossy link, made of two network namespaces in this process; both vanish with it.

The link is a veth pair: a token bucket (`tc tbf`) is its bottleneck and an nft rule drops packets at random. The sender
chooses congestion control, send buffer, size of writes and number of connections.
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
    """Send for so long over the link as it is to be, and say what arrived."""
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
            # The kernel doubles what it is told, for its own books.
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_kib * 1024 // 2)
            sender.settimeout(5)
            sender.connect((_THERE, _PORT))
            pairs.append((sender, stack.enter_context(listener.accept()[0])))
        metrics = _send(pairs, bytes(chunk_kib * 1024), transfer_s)
    used = metrics["goodput_mbps"] / rate_mbit
    return {"utility": used - delay_price * metrics["rtt_ms"], "utilisation": used, **metrics}


def _send(pairs: list[tuple[socket.socket, socket.socket]], chunk: bytes, transfer_s: float) -> dict[str, float]:
    """Threads write and read until the time is up; what counts is what arrived by then."""
    arrived, until = [0] * len(pairs), time.perf_counter() + transfer_s

    def write(sender: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while time.perf_counter() < until:
                sender.sendall(chunk)

    def read(place: int, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (left := until - time.perf_counter()) > 0:
                receiver.settimeout(left)
                arrived[place] += len(receiver.recv(1 << 20))

    threads = [threading.Thread(target=write, args=(sender,)) for sender, _ in pairs]
    threads += [threading.Thread(target=read, args=(place, pair[1])) for place, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, until - time.perf_counter()))
    rtt_ms, retransmitted = _tcp_info([sender for sender, _ in pairs])
    for sender, receiver in pairs:
        # What is still on its way is dropped, and a writer that waits is let go.
        with contextlib.suppress(OSError):
            sender.shutdown(socket.SHUT_RDWR)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for thread in threads:
        thread.join()
    return {"goodput_mbps": sum(arrived) * 8e-6 / transfer_s, "rtt_ms": rtt_ms, "retransmits": retransmitted}


def _tcp_info(senders: list[socket.socket]) -> tuple[float, float]:
    """The mean smoothed round trip in ms, and the retransmitted segments (linux/tcp.h, struct tcp_info)."""
    told = [sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104) for sender in senders]
    at = lambda info, offset: int.from_bytes(info[offset : offset + 4], "little")  # noqa: E731
    return sum(at(info, 68) for info in told) / len(told) / 1000, float(sum(at(info, 100) for info in told))


class Link:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.here, self.there = self._namespace(), self._namespace()
        self._now: tuple[float, int] | None = None
        far = f"/proc/{os.getpid()}/fd/{self.there}"
        self._run(self.here, f"ip link add link0 type veth peer name link1 netns {far}")
        for namespace, device, address in ((self.here, "link0", _HERE), (self.there, "link1", _THERE)):
            self._run(namespace, f"ip address add {address}/24 dev {device}")
            # One packet is one segment, as on a wire: a drop must not take 64 KiB at once.
            self._run(namespace, f"ip link set {device} up gso_max_segs 1")

    def set(self, drop_percent: float, rate_mbit: int) -> None:
        """Make the link as lossy and as fast as this."""
        if self._now == (drop_percent, rate_mbit):
            return
        self._now = drop_percent, rate_mbit
        self._run(self.here, f"tc qdisc replace dev link0 root tbf rate {rate_mbit}mbit burst 8kb limit 128kb")
        # Only packets with data: a lost handshake costs a second, which is not what is measured here.
        drop = f"ip length > 100 numgen random mod 10000 < {round(drop_percent * 100)} drop"
        self._run(
            self.there,
            "nft -f -",
            "add table ip loss\ndelete table ip loss\ntable ip loss {\n chain in {\n"
            f"  type filter hook input priority 0; policy accept;\n  {drop}\n }}\n}}\n",
        )

    def socket(self, namespace: int) -> socket.socket:
        """A socket that lives in a namespace, whoever uses it."""
        with self._inside(namespace):
            return socket.socket()

    def _run(self, namespace: int, command: str, text: str = "") -> None:
        with self._inside(namespace):
            done = subprocess.run(command.split(), input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")

    def _namespace(self) -> int:
        """A new network namespace; it lives as long as somebody holds this file."""
        with self._inside(self._home):
            _check(_libc.unshare(_CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    @contextlib.contextmanager
    def _inside(self, namespace: int) -> Iterator[None]:
        """This thread, and what it starts, in a namespace for a while."""
        _check(_libc.setns(namespace, _CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(self._home, _CLONE_NEWNET))


@cache
def _link() -> Link:
    """The link of this process, made at its first transfer."""
    if problem := missing():
        raise RuntimeError(problem)
    return Link()


def missing() -> str | None:
    """What this machine or this user lacks, and the next move."""
    if os.geteuid() != 0:
        return "this example makes network namespaces, which needs root: run it with sudo"
    tools = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"{', '.join(tools)} not found: apt-get install -y iproute2 nftables" if tools else None


class Needs(loopwright.Observer):
    """Ends the run before its first trial, rather than have all of them fail for one reason."""

    def before(self, trial: loopwright.Trial) -> None:
        """Leave with a word if something is missing."""
        del trial
        if problem := missing():
            sys.exit(f"error: {problem}")


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
