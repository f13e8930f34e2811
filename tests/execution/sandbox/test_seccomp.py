"""The system-call filter: its verdict on calls of both architectures, and its list in the documentation."""

import errno
import struct
from pathlib import Path

import pytest

from loopwright.execution.sandbox import SandboxError
from loopwright.execution.sandbox.seccomp import ABSENT, DENIED, SOCKET_FAMILIES, compile_filter, docker_profile

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
AF_VSOCK = 40
CLONE_NEWUSER, CLONE_NEWTIME, THREAD = 0x10000000, 0x80, 0x3D0F00
NUMBERS = {
    "x86_64": {"clone": 56, "unshare": 272, "socket": 41},
    "aarch64": {"clone": 220, "unshare": 97, "socket": 198},
}


def verdict(machine, number, argument=0, architecture=None):
    """What the program returns for this call, as the kernel would run it."""
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, argument, *[0] * 5)
    program = list(struct.iter_unpack("=HBBI", compile_filter(machine)))
    position, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, constant)
            case 0x06:
                return constant
            case 0x15 | 0x35 | 0x45:
                jumps = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                position += if_true if jumps else if_false
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


def failure(error):
    return 0x00050000 | error


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_listed_call_fails(machine):
    for calls, error in ((DENIED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        numbers = {name: getattr(each, machine) for name, each in calls.items() if getattr(each, machine) is not None}
        assert {name: verdict(machine, number) for name, number in numbers.items()} == dict.fromkeys(
            numbers, failure(error)
        )


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_other_calls_pass(machine):
    denied = {getattr(each, machine) for each in (*DENIED.values(), *ABSENT.values())}
    special = NUMBERS[machine]["socket"]
    assert {verdict(machine, number) for number in range(500) if number not in denied | {special}} == {ALLOWED}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_about_namespaces_and_sockets(machine):
    clone, unshare, socket = (NUMBERS[machine][name] for name in ("clone", "unshare", "socket"))
    assert verdict(machine, clone, THREAD) == ALLOWED
    assert verdict(machine, clone, CLONE_NEWUSER | 17) == failure(errno.EPERM)
    assert verdict(machine, clone, CLONE_NEWTIME) == ALLOWED
    assert verdict(machine, unshare, CLONE_NEWUSER) == verdict(machine, unshare, CLONE_NEWTIME) == failure(errno.EPERM)
    assert verdict(machine, unshare, 0x400) == ALLOWED
    assert {verdict(machine, socket, family) for family in SOCKET_FAMILIES.values()} == {ALLOWED}
    assert verdict(machine, socket, AF_VSOCK) == failure(errno.EAFNOSUPPORT)


def test_other_tables_of_calls_are_no_way_round():
    """Programs for i386 are killed, and calls by their x32 numbers do not exist."""
    assert verdict("x86_64", 288, architecture=0x40000003) == KILLED
    assert verdict("x86_64", 0x40000000 | 250) == failure(errno.ENOSYS)


def test_the_profile_for_docker_is_the_same_filter():
    rules = docker_profile()["syscalls"]
    names = {name for rule in rules for name in rule["names"]}
    assert names == {*DENIED, *ABSENT, "clone", "unshare", "socket"}
    refused = {arg["value"] for rule in rules if rule["names"] == ["socket"] for arg in rule["args"]}
    assert refused == {*range(17)} - {*SOCKET_FAMILIES.values()} | {16}, "all below 16, and those greater than 16"


def test_an_unknown_architecture_is_refused_with_the_alternative():
    with pytest.raises(SandboxError, match=r'not for riscv64\. Use "docker"'):
        compile_filter("riscv64")


def test_the_documentation_lists_the_filter():
    page = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()
    assert [name for name in (*DENIED, *ABSENT, *SOCKET_FAMILIES) if f"`{name}`" not in page] == []
