"""The doors of a room: how many go through at a time, and what happens where there are too few files for a room."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from loopwright.execution.sandbox import SandboxError
from loopwright.execution.sandbox.network_proxy import NetworkProxy, receive_files


def descriptors():
    return sorted(int(file.name) for file in Path("/proc/self/fd").iterdir())


def test_connections_that_are_too_many_wait_and_get_their_turn():
    """Given 40 callers that stay, then 32 get through, and each of the others when one of these has left."""

    async def main():
        served = []

        async def answer(reader, writer):
            served.append(writer)
            writer.write(b"x")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        gate = NetworkProxy((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",))
        await gate.serve([listening])
        before = len(descriptors())
        try:
            callers = [await asyncio.open_connection(*listening.getsockname()) for _ in range(40)]
            await asyncio.gather(*(reader.read(1) for reader, _ in callers[:32]))
            await asyncio.sleep(0.1)
            assert len(served) == 32
            # The callers' own ends, two more and the server's end for each that got through, and one that waits.
            assert len(descriptors()) - before <= 40 + 3 * 32 + 1
            for _, writer in callers[:8]:
                writer.close()
            assert await asyncio.gather(*(reader.read(1) for reader, _ in callers[32:])) == [b"x"] * 8
            for _, writer in callers:
                writer.close()
        finally:
            await gate.close()
            server.close()
        await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_shut_gate_lets_nobody_through():
    async def main():
        listening = socket.create_server(("127.0.0.1", 0))
        gate = NetworkProxy(("http://127.0.0.1:9",))
        await gate.serve([listening])
        gate.is_blocked = True
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        assert await reader.read() == b""
        writer.close()
        await gate.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_too_few_files_for_a_room_are_the_machines_fault_and_none_stays_open():
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:  # noqa: PTH123
        before = descriptors()
        socket.send_fds(theirs, [b"overlays"], [file.fileno()])
        with pytest.raises(SandboxError, match="ulimit -n"):
            receive_files(ours, 4)
        assert descriptors() == before
