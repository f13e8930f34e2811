"""Run as a file, inside new namespaces: opens the doors of a room, hands them out, and is gone.

Its standard input is a socket, or else one is in its directory, and then it stays, for nothing else keeps a container.
Over that go the listening sockets, in the order of the addresses, then the namespaces.
Without any packages, since each room waits for it: the namespaces live on through what it handed out.
"""

import _socket
import fcntl
import os
import struct
import sys

DOOR = "door"
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x49


def main(scratch: str, lowers: str, *addresses: str) -> None:
    """Listen at these addresses, each `host:port`; lay a writable layer over these directories."""
    os.chdir(scratch)
    laid = [name for name in lowers.split(",") if name and _lay_over(name)]
    waiting = os.path.exists(DOOR)  # noqa: PTH110  Without any packages.
    if not waiting:  # A container's loopback is up already.
        plain = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        fcntl.ioctl(plain.fileno(), _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
    listening = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        door.bind((host, int(port)))
        door.listen(128)
        listening.append(door)
    out = [door.fileno() for door in listening]
    out += [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "net", "mnt")]
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(out)}i", *out))
    caller = _socket.socket(_socket.AF_UNIX) if waiting else _socket.socket(fileno=0)
    if waiting:
        caller.connect(DOOR)
    caller.sendmsg([",".join(["laid", *laid]).encode()], [rights])
    if waiting:
        caller.recv(1)


def _lay_over(name: str) -> bool:
    """A layer over /NAME that takes all writes; not every kernel or disk can have one."""
    options = f"lowerdir=/{name},upperdir=upper/{name},workdir=work/{name},userxattr"
    mount = ("mount", "-t", "overlay", "-o", options, "overlay", f"root/{name}")
    return os.spawnvp(os.P_WAIT, "mount", mount) == 0  # noqa: S606  No shell is wanted.


if __name__ == "__main__":
    main(*sys.argv[1:])
