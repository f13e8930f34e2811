"""Run as a script: joins control groups, leaves the session keyring, opens the system-call filter, and becomes bwrap.

When the machine's memory runs out, the kernel ends the sandbox's processes first.

The kernel keys of this process, such as tickets for a network file system, would otherwise be those of the sandbox.
It imports no packages, since each command waits for it.
"""

import _ctypes
import os
import sys

FILTER_FD = 5
"""The open file from which bubblewrap reads its filter."""
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_OOM_SCORE = 500
_NO_KEYS = (1, 38)
"""Error numbers where kernel keys are forbidden (EPERM) or not supported (ENOSYS): a sandbox cannot use them either."""


def main(filter_file: str, groups: str, *command: str) -> None:
    """Become this command, with these control groups (a line for each) and the filter of this file."""
    for group in groups.splitlines():
        file = os.open(group, os.O_WRONLY)
        os.write(file, b"0")
        os.close(file)
    file = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    # As root, what is written here is also the least that the sandbox may set: it cannot protect itself.
    os.write(file, b"%d" % max(int(os.read(file, 16)), _OOM_SCORE))
    os.close(file)
    libc = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]  # None is this process.
    number = _KEYCTL[os.uname().machine]
    # Without a name: an anonymous keyring that nobody else can join.
    if _ctypes.call_function(_ctypes.dlsym(libc, "syscall"), (number, _JOIN_SESSION_KEYRING, 0)) < 0:
        import ctypes  # takes as long as all the rest

        library = ctypes.CDLL(None, use_errno=True)
        if library.syscall(number, _JOIN_SESSION_KEYRING, None) < 0 and ctypes.get_errno() not in _NO_KEYS:
            sys.exit(f"cannot create a session keyring: {os.strerror(ctypes.get_errno())}")
    program = os.open(filter_file, os.O_RDONLY)
    os.dup2(program, FILTER_FD)
    os.set_inheritable(FILTER_FD, True)  # It may be the same file.
    os.execvp(command[0], command)  # noqa: S606  No shell is needed.


if __name__ == "__main__":
    main(*sys.argv[1:])
