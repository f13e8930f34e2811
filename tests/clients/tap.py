"""A proxy on loopback that forwards every request to the gateway, and records what both sides sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass
class Exchange:
    """One request and its response, as they were on the wire."""

    method: str
    path: str
    request: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Of the response, with names in lower case."""
    response: bytes = b""
    complete: bool = False
    """Whether the client read it to the end."""

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


@contextmanager
def tapping(upstream: str) -> Iterator[tuple[str, list[Exchange]]]:
    """The address of the proxy, and the exchanges in the order of their requests."""
    exchanges: list[Exchange] = []

    class Handler(_Handler):
        target, log = upstream.removeprefix("http://"), exchanges

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", exchanges
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: str
    log: list[Exchange]

    def _forward(self) -> None:
        exchange = Exchange(self.command, self.path, self._body())
        self.log.append(exchange)
        connection = HTTPConnection(self.target, timeout=300)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(self.command, self.path, exchange.request or None, headers)
            response = connection.getresponse()
            exchange.status = response.status
            exchange.headers = {name.lower(): value for name, value in response.getheaders()}
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while part := response.read1(65536):
                exchange.response += part
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            exchange.complete = True
        except OSError:  # the client hung up: closing the connection tells the gateway
            self.close_connection = True
        finally:
            connection.close()

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815  the names that http.server looks for

    def log_message(self, format: str, *args: object) -> None:
        """Keep stderr for the tests."""
