"""A fake server that the engine tests of a module share."""

import pytest

from tests.engines.fake_servers import serve


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server
