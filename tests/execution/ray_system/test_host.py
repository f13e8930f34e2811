"""A host and its driver over a real connection, without a cluster."""

import asyncio
import concurrent.futures
import math
import os
import re
import struct
import subprocess
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from loopwright.core.errors import ClusterError, LaunchError
from loopwright.execution.base import CallResult, Command, FunctionCall
from loopwright.execution.ray.channel import Listener, connect
from loopwright.execution.ray.executor import Host, HostLost
from loopwright.execution.ray.host import HostSettings, TrialHost
from loopwright.execution.ray.messages import (
    HostAnswer,
    Package,
    answer_message,
    decode,
    encode,
    read_answer,
    read_trial,
    trial_message,
)
from loopwright.execution.ray.transfer import pack
from loopwright.testing.executors import alive, appears, command, written_pid

LIMIT_BYTES = 1 << 20
MINE = """
def work(n): return {"y": n + int(open("size").read())}
def note(text): open("parameters.json", "r+").write(text); return {}
"""


class Driver:
    """The driver's end: sends messages, and collects what comes back."""

    def __init__(self, listener):
        self.messages, self.disconnected = asyncio.Queue(), asyncio.Event()
        self.key = listener.expect(self)

    def on_connect(self, channel):
        self.channel = channel

    def on_message(self, message, blobs):
        self.messages.put_nowait(message if "node" in message else read_answer(message, blobs))

    def on_end(self, error=None):
        self.error = getattr(self, "error", None) or error
        self.disconnected.set()

    def start(self, key, work, *, last=None, package=None):
        self.channel.send(*trial_message(key, work, last, package))

    async def run(self, key, work, **options):
        self.start(key, work, **options)
        return await self.messages.get()

    async def cancel(self, key):
        self.channel.send({"do": "cancel", "key": key})
        return await self.messages.get()


@asynccontextmanager
async def host(files="shared"):
    """A host in this process, and its driver; the task ends without an error."""
    listener = Listener("127.0.0.1", LIMIT_BYTES)
    driver = Driver(listener)
    settings = HostSettings(files, output_bytes=LIMIT_BYTES, grace_s=1.0, artifact_bytes=LIMIT_BYTES, gpus=0)
    driver.task = asyncio.ensure_future(TrialHost(settings).serve(listener.address, driver.key, "/nowhere"))
    try:
        driver.place = await driver.messages.get()
        yield driver
        driver.channel.send({"do": "close"})
        await asyncio.wait_for(driver.task, 20)
        await driver.disconnected.wait()
    finally:
        await listener.close()


def sleep(directory, name, seconds):
    (directory / name).mkdir()
    return command(directory / name, f"echo $$ > pid; exec sleep {seconds}")


def test_a_late_cancel_ends_no_other_trial(tmp_path):
    """Given two trials one after another, a cancel of the first ends that one only, at once or late."""

    async def main():
        async with host() as driver:
            driver.start("first", sleep(tmp_path, "first", 60))
            assert (await driver.cancel("first")).cancelled
            driver.start("second", sleep(tmp_path, "second", 60))
            await appears(tmp_path / "second/pid")
            assert (await driver.cancel("second")).cancelled
            assert not alive(written_pid(tmp_path / "second/pid"))
            driver.start("third", sleep(tmp_path, "third", 0.3))
            assert (await driver.cancel("second")).value.exit_code == 0

    asyncio.run(main())


def test_a_trial_may_be_sent_as_what_differs_from_the_last_one(tmp_path):
    """Given the changes only, a command keeps all else of the last one, with the environment of this host."""

    async def main():
        async with host() as driver:
            script = ("sh", "-c", 'echo "$NAME $0"', "first")
            first = Command(script, tmp_path, {"NAME": "mine"}, tmp_path / "stdout", tmp_path / "stderr")
            await driver.run("1", first)
            assert (tmp_path / "stdout").read_text() == "mine first\n"
            await driver.run("2", replace(first, argv=(*script[:3], "second")), last=first)
            assert (tmp_path / "stdout").read_text() == "mine second\n"

    asyncio.run(main())


def test_c01_a_host_that_shares_no_files_returns_what_a_trial_wrote(tmp_path):
    """Given packed inputs and modules, a call and a command run in a directory of the node, which is deleted; a call
    that left nothing sends nothing.
    """
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/size").write_text("7")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/mine.py").write_text(MINE)
    package = Package(pack(tmp_path / "inputs", LIMIT_BYTES), (pack(tmp_path / "modules", LIMIT_BYTES),))
    call = FunctionCall(
        function="mine:work",
        path=(tmp_path / "elsewhere",),
        arguments={"n": 1},
        environment={"PATH": os.defpath},
        directory=tmp_path / "trial",
        parameters=b"{}",
    )

    async def main():
        async with host("auto") as driver:
            assert driver.place["shares_files"] is False
            answer = await driver.run("1", call, package=package)
            assert answer.value.value == {"y": 8}
            assert b"parameters.json" in answer.files
            assert b"size" not in answer.files
            there = command(tmp_path / "trial", f"pwd; cat {tmp_path}/trial/size; echo made > made")
            answer = await driver.run("2", there, package=package)
            assert answer.value.exit_code == 0
            assert b"made" in answer.files
            empty = replace(package, directory=pack(tmp_path / "modules", LIMIT_BYTES, suffixes=("none",)))
            for text, files in (("{", b""), ("#", b"#}")):
                note = replace(call, function="mine:note", arguments={"text": text})
                answer = await driver.run(f"note {text}", note, package=empty)
                assert (answer.error, files in answer.files, bool(answer.files)) == ("", True, bool(files))
        assert not (tmp_path / "trial").exists()

    asyncio.run(main())


def test_c03_a_full_disk_of_the_node_is_its_fault(tmp_path, monkeypatch):
    """Given inputs that cannot be written, the trial is lost to the infrastructure, and the next one runs."""

    def full(*_):
        raise OSError(28, "No space left on device")

    async def main():
        async with host("copy") as driver:
            monkeypatch.setattr("loopwright.execution.ray.host.unpack", full)
            answer = await driver.run("1", command(tmp_path, "true"), package=Package())
            assert (answer.infra, answer.error) == (True, "[Errno 28] No space left on device")
            monkeypatch.undo()
            empty = Package(pack(tmp_path, LIMIT_BYTES))
            assert (await driver.run("2", command(tmp_path, "true"), package=empty)).value.exit_code == 0

    asyncio.run(main())


def test_s13_a_host_ends_its_trial_when_its_driver_is_gone(tmp_path):
    """Given a driver that disconnects in the middle of a trial, the trial is killed and the task ends."""

    async def main():
        async with host() as driver:
            driver.start("1", sleep(tmp_path, "trial", 60))
            await appears(tmp_path / "trial/pid")
            driver.channel.close()
            await asyncio.wait_for(asyncio.shield(driver.task), 20)
            assert not alive(written_pid(tmp_path / "trial/pid"))
            driver.channel.send = lambda _: None  # it is closed already

    asyncio.run(main())


def test_messages_keep_every_value(tmp_path):
    """Given values that JSON libraries like to change, a trial and its answer arrive as they were sent."""
    call = FunctionCall(
        function="mine:work",
        path=(tmp_path,),
        arguments={"n": 2**70, "x": 1.0, "flag": True, "nested": {"words": ["a", None]}},
        environment={"NAME": "caf\udce9"},
        directory=tmp_path / "trial",
        parameters=b'{"n": 1}',
        checkpoint=tmp_path / "checkpoint",
    )
    message, blobs = trial_message("1", call, package=Package(b"\x00", (b"\xff",)))
    arrived, package = read_trial(decode(encode(message)), blobs, None)
    assert (arrived, package) == (call, Package(b"\x00", (b"\xff",)))
    assert [type(value) for value in arrived.arguments.values()] == [int, float, bool, dict]
    other = replace(call, arguments={"n": 1}, checkpoint=None)
    message, blobs = trial_message("2", other, call)
    assert set(message["fields"]) == {"arguments", "checkpoint"}
    assert read_trial(decode(encode(message)), blobs, call) == (other, None)
    answer = HostAnswer(CallResult({"wall_s": 0.1}, 1, 2, value={"y": math.inf, "n": 2**70}), b"\x80")
    message, blobs = answer_message(answer)
    assert read_answer(decode(encode(message)), blobs) == answer


def test_neither_end_reads_what_a_stranger_sends():
    """Given a peer without the key, a driver disconnects it, and a host does not connect to it."""

    async def main():
        listener = Listener("127.0.0.1", LIMIT_BYTES)
        driver = Driver(listener)
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(bytes(24) + b"cos\nsystem\n")
        assert await reader.read() == b""
        writer.close()

        async def pretend(_, writer):
            writer.write(bytes(24))
            writer.close()

        impostor = await asyncio.start_server(pretend, "127.0.0.1", 0)
        with pytest.raises(ConnectionRefusedError):
            await connect(impostor.sockets[0].getsockname(), driver.key, driver, LIMIT_BYTES)
        impostor.close()
        await listener.close()
        assert driver.messages.empty()

    asyncio.run(main())


def test_the_id_of_a_key_admits_nobody_and_uses_nothing_up():
    """Given the id of a key and a wrong secret, the driver sends nothing; its host connects afterwards."""

    async def main():
        listener = Listener("127.0.0.1", LIMIT_BYTES)
        driver, user = Driver(listener), Driver(listener)
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(driver.key[:8] + bytes(16))
        assert await reader.read() == b""
        writer.close()
        await connect(listener.address, driver.key, user, LIMIT_BYTES)
        user.channel.send({"node": "here"})
        assert await driver.messages.get() == {"node": "here"}
        user.channel.close()
        await listener.close()

    asyncio.run(main())


async def answer_of_host(*, sends):
    """What a driver learns of a host that sends these bytes once it is connected."""
    listener = Listener("127.0.0.1", LIMIT_BYTES)
    driver = Driver(listener)
    reader, writer = await asyncio.open_connection(*listener.address)
    writer.write(driver.key[:24] + sends)
    assert await reader.read() in (b"", driver.key[:8] + driver.key[24:])
    await driver.disconnected.wait()
    writer.close()
    await listener.close()
    return driver.error


def test_a_frame_has_a_limit_that_the_error_names():
    """Given a length beyond the limit, the driver disconnects without waiting for the rest, and says which setting."""
    error = asyncio.run(answer_of_host(sends=struct.pack(">IQQ", 2, 10, 1 << 40)))

    limit_bytes = 2 * LIMIT_BYTES + 64 * 2**20
    assert re.search(rf"1,099,511,627,786 bytes.* {limit_bytes:,}: twice \[system\] artifacts.*Raise", str(error))


@pytest.mark.parametrize(
    ("sends", "message"),
    [
        (struct.pack(">I", 0), "a frame of 0 parts"),
        (struct.pack(">IQ", 1, 5) + b"words", "Expecting value"),
        (struct.pack(">IQ", 1, 2) + b"[]", "a message is a JSON object"),
        (struct.pack(">IQ", 1, 2) + b"{}", "'error'"),
    ],
)
def test_a_message_that_cannot_be_read_ends_the_connection_and_is_told(sends, message):
    """Given bytes that are not a message, the user of the connection gets the reason, once."""
    assert message in str(asyncio.run(answer_of_host(sends=sends)))


def test_a_trial_whose_answer_cannot_be_read_is_lost_with_that_reason(tmp_path):
    """Given an answer without its fields, the driver disconnects that host and loses the trial with the reason."""

    class Task(concurrent.futures.Future):
        def future(self):
            return self

    async def main():
        listener, user, keys = Listener("127.0.0.1", LIMIT_BYTES), Driver.__new__(Driver), []
        user.disconnected = asyncio.Event()
        lost = Host(listener, lambda key: keys.append(key) or Task())
        await connect(listener.address, keys[0], user, LIMIT_BYTES)
        user.channel.send({"node": "here", "shares_files": True})
        await lost.ready
        user.on_message = lambda *_: user.channel.send({"infra": True})
        with pytest.raises(HostLost, match="it sent what cannot be read: 'error'"):
            await lost.use("1", command(tmp_path, "true"), None)
        await user.disconnected.wait()
        assert lost.is_lost
        await listener.close()

    asyncio.run(main())


def test_a_host_that_cannot_read_its_driver_ends_with_the_reason(tmp_path):
    """Given a trial of an unknown type, the host ends its task with the error, which Ray gives to the driver."""

    async def main():
        async with host() as driver:
            driver.channel.send({"do": "use", "key": "1", "packed": False, "type": "Sonnet", "fields": {}})
            with pytest.raises(KeyError, match="Sonnet"):
                await asyncio.wait_for(driver.task, 20)
            driver.channel.send = lambda _: None  # it is closed already
            driver.task = asyncio.sleep(0)

    asyncio.run(main())


def test_a_trial_whose_files_exceed_the_limit_fails_and_its_host_goes_on(tmp_path, monkeypatch):
    """Given answers and trials above the limit, each end refuses to send them, and the next trial runs."""
    monkeypatch.setattr("loopwright.execution.ray.channel._MESSAGE_BYTES", 20_000 - 2 * LIMIT_BYTES)

    async def main():
        async with host("copy") as driver:
            empty = Package(pack(tmp_path, LIMIT_BYTES))
            answer = await driver.run("1", command(tmp_path, "seq 9999"), package=empty)
            assert (answer.infra, answer.value) == (False, None)
            assert "bytes for one trial are more than a Ray host and its driver send each other, 20,000" in answer.error
            with pytest.raises(LaunchError, match="Raise artifacts"):
                driver.start("2", command(tmp_path, "true"), package=Package(bytes(20_000)))
            assert (await driver.run("3", command(tmp_path, "true"), package=empty)).value.exit_code == 0

    asyncio.run(main())


def test_a_host_that_cannot_connect_names_both_ends():
    """Given a closed port, the task says which node could not reach which address."""

    async def main():
        listener = Listener("127.0.0.1", LIMIT_BYTES)
        driver, (address, port) = Driver(listener), listener.address
        await listener.close()
        settings = HostSettings("auto", LIMIT_BYTES, 1.0, LIMIT_BYTES, 0)
        with pytest.raises(ClusterError, match=rf"cannot connect to the driver at {address}:{port}: "):
            await TrialHost(settings).serve((address, port), driver.key, "")

    asyncio.run(main())


def test_a_channel_uses_the_certificates_of_ray(tmp_path, monkeypatch):
    """Given Ray's TLS, trials go over it too, and a peer without a certificate is not heard."""
    names = {"RAY_TLS_SERVER_CERT": "cert", "RAY_TLS_SERVER_KEY": "key", "RAY_TLS_CA_CERT": "cert"}
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=ray"]
    subprocess.run(
        [*make, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True, timeout=60
    )

    async def main():
        async with host() as driver:
            tls = driver.channel._transport.get_extra_info("ssl_object")
            assert tls.version() == "TLSv1.3"
            assert (await driver.run("1", command(tmp_path, "true"))).value.exit_code == 0
            address = driver.channel._transport.get_extra_info("sockname")
            reader, writer = await asyncio.open_connection(*address)
            writer.write(driver.key)
            assert driver.key[24:] not in await reader.read()
            writer.close()

    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, file in names.items():
        monkeypatch.setenv(name, str(tmp_path / file))
    asyncio.run(main())
