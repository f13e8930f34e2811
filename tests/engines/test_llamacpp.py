"""The real llama.cpp server, in a separate virtual environment: `make test-engines`."""

import pytest
from benchmarks.servers import llamacpp, missing

from loopwright.engines.base import ContextFull, Sampling
from tests.engines.real_server import RealServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing("llamacpp") is not None, reason=str(missing("llamacpp"))),
]


@pytest.fixture(scope="module")
def url():
    with llamacpp() as url:
        yield url


class TestLlamaCpp(RealServer):
    wire = "llamacpp"
    penalties_count_the_prompt = True

    @pytest.fixture(autouse=True)
    def _url(self, url):
        self.url = url

    def test_a_prompt_that_is_too_long_is_refused(self, tmp_path):
        async def body(engine):
            with pytest.raises(ContextFull, match="maximum context length is 2048 tokens"):
                [c async for c in engine.generate([5] * 3000, Sampling(), seed="s")]

        self.use(tmp_path, body)
