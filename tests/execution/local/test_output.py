"""Capped output: complete below the cap; above it, only the middle is omitted."""

from hypothesis import given
from hypothesis import strategies as st

from loopwright.execution.local.output import TAIL_BYTES, CappedFile


def write(path, limit_bytes: int, chunks: list[bytes]) -> bytes:
    file = CappedFile(str(path), limit_bytes)
    file.open()
    for chunk in chunks:
        file.write(chunk)
    file.finish()
    assert file.produced_bytes == sum(map(len, chunks))
    return path.read_bytes()


@given(
    limit_bytes=st.integers(0, 300_000),
    sizes=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 100_000)), max_size=8),
)
def test_beginning_and_end_are_written_and_the_rest_is_counted(tmp_path_factory, limit_bytes, sizes):
    path = tmp_path_factory.mktemp("output") / "stdout"
    chunks = [bytes([index]) * size for index, size in enumerate(sizes)]
    data = b"".join(chunks)
    omitted = max(0, len(data) - limit_bytes - TAIL_BYTES)
    if omitted:
        marker = b"\n[loopwright: %d bytes left out]\n" % omitted
        expected = data[:limit_bytes] + marker + data[-TAIL_BYTES:]
    else:
        expected = data
    assert write(path, limit_bytes, chunks) == expected
