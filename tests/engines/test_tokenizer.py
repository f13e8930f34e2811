"""The byte tokenizer: exact for any text."""

from hypothesis import example, given
from hypothesis import strategies as st

from loopwright.engines.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.size - 1) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0xED, 0xA0]), max_size=20)


@given(st.text())
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(), st.sampled_from(list(TOKENIZER.specials)))
def test_text_never_becomes_a_special_token(text, name):
    assert not set(TOKENIZER.encode(text + name + text)) & set(TOKENIZER.specials.values())


@given(IDS)
@example([0xE2, 0x82, 0xE2, 0x82, 0xAC])
@example([0xE2, 257, 0x82, 0xAC])
@example([0x41, 0xE2])
def test_the_pieces_join_to_the_text(ids):
    pieces = TOKENIZER.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_a_long_character_belongs_to_its_first_byte():
    assert TOKENIZER.pieces([*TOKENIZER.encode("a€b"), 257]) == ["a", "€", "", "", "b", "<|im_end|>"]


def test_invalid_unicode_is_replaced_before_encoding():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"


def test_unknown_ids_can_be_decoded():
    assert TOKENIZER.decode([65, 9999, -1]) == "A\ufffd\ufffd"
    assert TOKENIZER.pieces([65, 9999, -1]) == ["A", "\ufffd", "\ufffd"]
