"""Addresses: parsing, and where a server may listen."""

import socket
import stat

import pytest
from tests.envs.live.peers import Walker, serving

from loopwright.envs.live.address import Address, AddressError
from loopwright.envs.live.remote import RemoteServer
from loopwright.envs.live.serve import EnvServer


def test_a_unix_socket_is_private_and_removed_with_the_server(tmp_path):
    path = tmp_path / "s"
    with serving(Walker, f"unix://{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_only_a_stale_socket_file_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(Walker, f"unix://{path}") as server:
        with pytest.raises(AddressError, match="another server uses it"):
            EnvServer(Walker, f"unix://{path}")
        RemoteServer(server.address).close()
    path.write_text("precious")
    with pytest.raises(AddressError, match="is not a socket"):
        EnvServer(Walker, f"unix://{path}")
    assert path.read_text() == "precious"


def test_a_server_removes_only_its_own_socket(tmp_path):
    path = tmp_path / "s"
    with EnvServer(Walker, f"unix://{path}"):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "new"))
            (tmp_path / "new").rename(path)
    assert path.exists()


def test_tcp_is_local_unless_public():
    with pytest.raises(AddressError, match=r"can be reached from other machines.*--public"):
        EnvServer(Walker, "tcp://0.0.0.0:0")
    with EnvServer(Walker, "tcp://0.0.0.0:0", public=True) as server:
        assert not server.address.endswith(":0")
        with pytest.raises(AddressError, match="Address already in use"):
            EnvServer(Walker, server.address.replace("0.0.0.0", "127.0.0.1"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/run/s",
        "unix://",
        "unix://relative/s",
        "tcp://",
        "tcp://host",
        "tcp://:80",
        "tcp://h:port",
        "tcp://h:1/x",
        "http://h:1",
    ],
)
def test_a_malformed_address_is_an_error_that_shows_the_forms(text):
    with pytest.raises(AddressError, match=r"Write 'unix:///path/to.sock' or 'tcp://host:port'\."):
        Address.parse(text)


@pytest.mark.parametrize("text", ["unix:///run/a b#c?.sock", "tcp://localhost:5555", "tcp://[::1]:5555"])
def test_an_address_is_printed_as_it_was_written(text):
    assert str(Address.parse(text)) == text


def test_an_unusable_path_is_an_address_error(tmp_path):
    for path in (tmp_path / ("x" * 200), tmp_path / "no" / "such"):
        with pytest.raises(AddressError, match="cannot listen at"):
            EnvServer(Walker, f"unix://{path}")
