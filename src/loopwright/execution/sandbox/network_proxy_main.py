"""Run as a script inside new namespaces: opens the listening sockets of a sandbox, passes them out, and exits.

Its standard input is a socket; or there is one in its directory, and then the process stays, since nothing else keeps
the container alive. It sends the listening sockets, in the order of the addresses, then the namespaces.
It imports no packages, since each sandbox waits for it; the open files that it passed out keep the namespaces alive.
"""

import _socket
import fcntl
import os
import struct
import sys

SOCKET_NAME = "handover"
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x49


def main(scratch: str, lowers: str, *addresses: str) -> None:
    """Listen at these addresses, each `host:port`, and mount a writable layer over these directories."""
    os.chdir(scratch)
    overlays = [name for name in lowers.split(",") if name and _mount_overlay(name)]
    in_container = os.path.exists(SOCKET_NAME)  # noqa: PTH110  Without any packages.
    if not in_container:  # A container's loopback is up already.
        plain = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        fcntl.ioctl(plain.fileno(), _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
    listeners = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind((host, int(port)))
        listener.listen(128)
        listeners.append(listener)
    fds = [listener.fileno() for listener in listeners]
    fds += [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "net", "mnt")]
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
    parent = _socket.socket(_socket.AF_UNIX) if in_container else _socket.socket(fileno=0)
    if in_container:
        parent.connect(SOCKET_NAME)
    parent.sendmsg([",".join(["overlays", *overlays]).encode()], [rights])
    if in_container:
        parent.recv(1)


def _mount_overlay(name: str) -> bool:
    """Mount a layer over /NAME that takes all writes; not every kernel or disk supports one."""
    options = f"lowerdir=/{name},upperdir=upper/{name},workdir=work/{name},userxattr"
    mount = ("mount", "-t", "overlay", "-o", options, "overlay", f"root/{name}")
    return os.spawnvp(os.P_WAIT, "mount", mount) == 0  # noqa: S606  No shell is needed.


if __name__ == "__main__":
    main(*sys.argv[1:])
