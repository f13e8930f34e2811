"""The system-call filter of a sandbox: the BPF program that `bwrap --seccomp` loads, and a profile for older Dockers.

Bubblewrap drops all privileges, so most of these calls would fail anyway. The filter is for those that need none and
reach what no namespace separates (kernel keys, io_uring, vsock), and for bugs in the others. docs/sandbox.md lists it.
"""

import errno
import platform
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from loopwright.execution.sandbox.base import SandboxError


class _Numbers(NamedTuple):
    """The number of a system call on each architecture; None where it does not exist."""

    x86_64: int | None
    aarch64: int | None


def _same(number: int) -> _Numbers:
    """Calls since Linux 5.1 have one number everywhere."""
    return _Numbers(number, number)


DENIED: Mapping[str, _Numbers] = {
    # Kernel keys: they belong to a user, and all sandboxes have the same.
    "add_key": _Numbers(248, 217),
    "request_key": _Numbers(249, 218),
    "keyctl": _Numbers(250, 219),
    # Mounts and namespaces.
    "mount": _Numbers(165, 40),
    "umount2": _Numbers(166, 39),
    "pivot_root": _Numbers(155, 41),
    "chroot": _Numbers(161, 51),
    "open_tree": _same(428),
    "move_mount": _same(429),
    "fsopen": _same(430),
    "fsconfig": _same(431),
    "fsmount": _same(432),
    "fspick": _same(433),
    "mount_setattr": _same(442),
    "open_tree_attr": _same(467),
    "setns": _Numbers(308, 268),
    # Files by handle, past every mount.
    "open_by_handle_at": _Numbers(304, 265),
    # Code in the kernel.
    "bpf": _Numbers(321, 280),
    "init_module": _Numbers(175, 105),
    "finit_module": _Numbers(313, 273),
    "delete_module": _Numbers(176, 106),
    "kexec_load": _Numbers(246, 104),
    "kexec_file_load": _Numbers(320, 294),
    # Page faults, events and logs of the whole machine.
    "userfaultfd": _Numbers(323, 282),
    "perf_event_open": _Numbers(298, 241),
    "fanotify_init": _Numbers(300, 262),
    "lookup_dcookie": _Numbers(212, 18),
    "syslog": _Numbers(103, 116),
    # Settings of the whole machine.
    "acct": _Numbers(163, 89),
    "quotactl": _Numbers(179, 60),
    "quotactl_fd": _same(443),
    "swapon": _Numbers(167, 224),
    "swapoff": _Numbers(168, 225),
    "reboot": _Numbers(169, 142),
    "sethostname": _Numbers(170, 161),
    "setdomainname": _Numbers(171, 162),
    "settimeofday": _Numbers(164, 170),
    "clock_settime": _Numbers(227, 112),
    "ioperm": _Numbers(173, None),
    "iopl": _Numbers(172, None),
}
"""Calls that fail with EPERM."""
ABSENT: Mapping[str, _Numbers] = {
    "io_uring_setup": _same(425),
    "io_uring_enter": _same(426),
    "io_uring_register": _same(427),
    "clone3": _same(435),
}
"""Calls that fail with ENOSYS, so that programs use older ones: io_uring does what this filter cannot see, and a filter
cannot read the flags of clone3."""
SOCKET_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""The only kinds of sockets: the network namespace separates these, but not AF_VSOCK, for example."""
_CLONE, _UNSHARE, _SOCKET = _Numbers(56, 220), _Numbers(272, 97), _Numbers(41, 198)
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_NEW_TIME = 0x80
"""CLONE_NEWTIME, which means something else to clone."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""The second table of calls of x86_64, which would pass under other numbers."""
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def compile_filter(machine: str = platform.machine()) -> bytes:
    """The program for this architecture; SandboxError if there is none."""
    if machine not in _ARCHITECTURES:
        raise SandboxError(
            f'sandbox = "bwrap" has a system-call filter for {" and ".join(_ARCHITECTURES)}, not for {machine}. '
            'Use "docker".'
        )

    def number(call: _Numbers) -> int | None:
        return call.x86_64 if machine == "x86_64" else call.aarch64

    program = [
        _step(_LOAD, _ARCHITECTURE_AT),
        # Programs of another architecture, such as 32-bit ones, have other numbers.
        *(_step(_EQUAL, _ARCHITECTURES[machine], if_true=1), _step(_RETURN, _KILL)),
        _step(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += (_step(_AT_LEAST, _X32, if_false=1), _fail(errno.ENOSYS))
    for calls, error in ((DENIED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for call in filter(None, map(number, calls.values())):
            program += (_step(_EQUAL, call, if_false=1), _fail(error))
    for numbers, flags in ((_CLONE, _NEW_NAMESPACES), (_UNSHARE, _NEW_NAMESPACES | _NEW_TIME)):
        program += (
            *(_step(_EQUAL, number(numbers) or 0, if_false=4), _step(_LOAD, _FIRST_ARGUMENT_AT)),
            *(_step(_ANY_BIT, flags, if_false=1), _fail(errno.EPERM), _step(_RETURN, _ALLOW)),
        )
    families = SOCKET_FAMILIES.values()
    program += (_step(_EQUAL, number(_SOCKET) or 0, if_false=len(families) + 2), _step(_LOAD, _FIRST_ARGUMENT_AT))
    program += (_step(_EQUAL, family, if_true=len(families) - index) for index, family in enumerate(families))
    program += (_fail(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW))
    return b"".join(program)


def docker_profile() -> dict[str, Any]:
    """The same filter as a profile for Docker."""

    def rule(names: Iterable[str], error: int, *conditions: tuple[str, int]) -> dict[str, Any]:
        # For a mask the second value is what must remain of the argument.
        args = [{"index": 0, "op": f"SCMP_CMP_{op}", "value": value, "valueTwo": value} for op, value in conditions]
        return {"names": [*names], "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": args}

    flags = [1 << bit for bit in range(32) if _NEW_NAMESPACES & 1 << bit]
    families = SOCKET_FAMILIES.values()
    others = [family for family in range(max(families)) if family not in families]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            rule(DENIED, errno.EPERM),
            rule(ABSENT, errno.ENOSYS),
            *(rule(["clone", "unshare"], errno.EPERM, ("MASKED_EQ", flag)) for flag in flags),
            rule(["unshare"], errno.EPERM, ("MASKED_EQ", _NEW_TIME)),
            *(rule(["socket"], errno.EAFNOSUPPORT, ("EQ", family)) for family in others),
            rule(["socket"], errno.EAFNOSUPPORT, ("GT", max(families))),
        ],
    }


def _step(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction: for comparisons, how many of the next ones are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _fail(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)
