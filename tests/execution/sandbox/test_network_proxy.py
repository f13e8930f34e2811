"""The network proxy: addresses inside, the number of connections, and running out of file descriptors."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from loopwright.execution.sandbox import SandboxError
from loopwright.execution.sandbox.network_proxy import NetworkProxy, receive_files


def descriptors():
    return sorted(int(file.name) for file in Path("/proc/self/fd").iterdir())


def test_excess_connections_wait():
    """Given 40 clients that stay connected, 32 are served, and each of the others when one of these leaves."""

    async def main():
        served = []

        async def respond(reader, writer):
            served.append(writer)
            writer.write(b"x")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        proxy = NetworkProxy((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",))
        await proxy.serve([listener])
        before = len(descriptors())
        try:
            clients = [await asyncio.open_connection(*listener.getsockname()) for _ in range(40)]
            await asyncio.gather(*(reader.read(1) for reader, _ in clients[:32]))
            await asyncio.sleep(0.1)
            assert len(served) == 32
            # The clients' sockets, three more for each that is served, and one that waits.
            assert len(descriptors()) - before <= 40 + 3 * 32 + 1
            for _, writer in clients[:8]:
                writer.close()
            assert await asyncio.gather(*(reader.read(1) for reader, _ in clients[32:])) == [b"x"] * 8
            for _, writer in clients:
                writer.close()
        finally:
            await proxy.close()
            server.close()
        await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_blocked_proxy_closes_connections():
    async def main():
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = NetworkProxy(("http://127.0.0.1:9",))
        await proxy.serve([listener])
        proxy.is_blocked = True
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
        await proxy.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_running_out_of_file_descriptors_is_an_error_and_leaves_none_open():
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:  # noqa: PTH123
        before = descriptors()
        socket.send_fds(theirs, [b"overlays"], [file.fileno()])
        with pytest.raises(SandboxError, match="ulimit -n"):
            receive_files(ours, 4)
        assert descriptors() == before


def test_names_and_loopback_stay_and_other_addresses_become_loopback():
    """Given several addresses, each has its own address inside; names stay, so that certificates match."""
    urls = ("https://models.example/v1", "http://[::1]:8400", "http://0.0.0.0:8400", "http://localhost:9/x")
    proxy = NetworkProxy(urls)
    assert proxy.url_inside("https://models.example/v1/chat") == "https://models.example/v1/chat"
    assert proxy.url_inside("http://[::1]:8400/a?b=c") == "http://127.77.0.2:8400/a?b=c"
    assert proxy.url_inside("http://0.0.0.0:8400") == "http://127.77.0.3:8400"
    assert proxy.url_inside("http://localhost:9/y") == "http://localhost:9/y"
    assert proxy.hosts() == "127.0.0.1\tlocalhost\n127.77.0.1\tmodels.example\n"


def test_other_urls_have_no_address_inside():
    with pytest.raises(SandboxError, match="allowed_urls"):
        NetworkProxy(("http://127.0.0.1:8400",)).url_inside("http://127.0.0.1:8401")


@pytest.mark.parametrize("url", ["127.0.0.1:8400", "http://", "file:///etc", "http://a:port"])
def test_urls_without_host_and_port_are_refused(url):
    with pytest.raises(SandboxError, match="http://host:port"):
        NetworkProxy((url,))
