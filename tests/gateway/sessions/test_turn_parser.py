"""The turn parser: pieces are never withdrawn, and joined they are the message."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.turn_parser import TextDecoder, TurnParser

END = 257
TEXT = st.text(alphabet="ab \n<>/€😀\u0301", max_size=8)
CALL = st.builds(lambda n: f'<tool_call>{{"name": "f", "arguments": {{"x": {n}}}}}</tool_call>', st.integers(0, 99))
PART = st.one_of(TEXT, CALL, st.sampled_from(["<tool_call>{", "<tool_call>no</tool_call>", "</tool_call>", "<tool"]))
SPEECH = st.lists(PART, max_size=6).map("".join)


def reader_of(**options):
    return TurnParser(ByteTokenizer(), {END}, call_id="c", **options)


def pieces_of(ids, sizes, **options):
    """All pieces of ids that arrive in chunks of these sizes, and the parser afterwards."""
    reader, pieces, at = reader_of(**options), [], 0
    while at < len(ids):
        size = sizes[at % len(sizes)]
        chunk = ids[at : at + size]
        pieces += reader.feed(chunk, [-float(at + i) for i in range(len(chunk))])
        at += size
    return [*pieces, *reader.finish()], reader


def joined(pieces):
    calls = {}
    for piece in pieces:
        if piece.index is not None:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.name, "arguments": ""})
            call["arguments"] += piece.arguments
    return "".join(piece.text for piece in pieces), [calls[index] for index in sorted(calls)]


@settings(max_examples=400, deadline=None)
@given(SPEECH, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_pieces_joined_are_the_message(text, sizes, ends, raw):
    ids = ByteTokenizer().encode(text) + [END] * ends
    pieces, reader = pieces_of(ids, sizes, raw=raw)
    content, calls = joined(pieces)
    assert content == reader.message["content"]
    tool_calls = [{"id": c["id"], **c["function"]} for c in reader.message.get("tool_calls", ())]
    assert calls == [{"id": c["id"], "name": c["name"], "arguments": c["arguments"]} for c in tool_calls]
    assert [token for piece in pieces for token in piece.ids] == ids, "every token is reported once, in order"
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [-float(i) for i in range(len(ids))]
    whole = reader_of(raw=raw)
    whole.parse(ids)
    assert (whole.message, whole.malformed) == (reader.message, reader.malformed)


@settings(max_examples=300, deadline=None)
@given(SPEECH, st.lists(st.text("ab <t", min_size=1, max_size=3), min_size=1, max_size=2))
def test_text_is_cut_at_the_first_stop_string(text, stops):
    pieces, reader = pieces_of(ByteTokenizer().encode(text), [1], stop=stops, raw=True)
    # The first complete stop string ends the turn, even if another one started before it.
    beginning = next((text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), text)
    positions = [beginning.find(stop) for stop in stops if stop in beginning]
    assert joined(pieces)[0] == (text[: min(positions)] if positions else text)
    assert (reader.stopped_by is None) == (not positions)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24), st.integers(1, 5))
def test_invalid_bytes_are_read_as_in_one_chunk(data, size):
    reader = TextDecoder(ByteTokenizer())
    text = "".join(reader.feed(data[at : at + size]) for at in range(0, len(data), size)) + reader.finish()
    assert text == data.decode("utf-8", "replace")


def test_partial_characters_and_tags_wait():
    reader = reader_of()
    euro = list("€".encode())
    assert [piece.text for piece in reader.feed([97, *euro[:2]], [0.0] * 3)] == ["a"]
    (piece,) = reader.feed(euro[2:], [0.0])
    assert (piece.text, piece.ids) == ("€", tuple(euro[2:]))
    assert reader.feed(list(b"<tool_"), [0.0] * 6) == []
    assert "".join(piece.text for piece in reader.feed(list(b"x "), [0.0] * 2)) == "<tool_x"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('ok\n<tool_call>{"name": "f"}</tool_call>\n', "ok"),
        ('<tool_call>{"name": "f"}</tool_call>', ""),
        ('\n <tool_call>{"name": "f"}</tool_call>\nthen', "then"),
        ("  plain \n", "  plain \n"),
        ('<tool_call>no</tool_call><tool_call>{"name": "f"}', "<tool_call>no</tool_call>"),
    ],
)
def test_white_space_around_calls_is_not_text(text, content):
    reader = reader_of()
    reader.parse(ByteTokenizer().encode(text))
    assert reader.message["content"] == content
    assert [json.loads(c["function"]["arguments"]) for c in reader.message.get("tool_calls", ())] in ([{}], [])
