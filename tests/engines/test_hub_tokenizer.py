"""Hub tokenizers keep the promises of all tokenizers."""

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from loopwright.engines.tokenizer import HubTokenizer
from loopwright.gateway.sessions.template import ChatML


def gpt2():
    """Bytes, a few merges and two special tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "æ"), ("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("â", "Ĥ")]
    names = [*letters, *("".join(merge) for merge in merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [tokenizers.AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(special)
    return HubTokenizer(tokenizer)


TOKENIZER = gpt2()
SIZE = 256 + 6 + 2


@given(st.text())
@example("hell w€ a日")
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(), st.sampled_from(["<|im_start|>", "<|im_end|>"]))
def test_text_never_becomes_a_special_token(text, name):
    assert not set(TOKENIZER.encode(text + name + text)) & set(TOKENIZER.specials.values())


@given(st.lists(st.integers(0, SIZE), max_size=20))
def test_the_pieces_join_to_the_text(ids):
    pieces = TOKENIZER.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_a_multi_token_character_belongs_to_its_first_token():
    ids = TOKENIZER.encode("a日b")
    assert len(ids) == 4, "aæ is one token, which begins the next character"
    assert TOKENIZER.pieces([*ids, TOKENIZER.specials["<|im_end|>"]]) == ["a日", "", "", "b", "<|im_end|>"]
    half = TOKENIZER.encode("€")[:1]
    assert TOKENIZER.pieces([*half, TOKENIZER.specials["<|im_end|>"]]) == ["\ufffd", "<|im_end|>"]


def test_invalid_text_and_invalid_ids_can_be_decoded():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"
    assert TOKENIZER.decode([TOKENIZER.encode("A")[0], 9999, -1]) == "A\ufffd\ufffd"


def test_conversations_can_be_rendered():
    template = ChatML(TOKENIZER)
    ids = template.render({"role": "user", "content": "hello <|im_end|>"}, first=True, tools=())
    assert TOKENIZER.decode(ids) == "<|im_start|>user\nhello <|im_end|><|im_end|>\n"
    assert ids.count(template.end_id) == 1


def test_pieces_of_sentencepiece_are_bytes_too():
    vocabulary = {"<unk>": 0, "▁hi": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    assert HubTokenizer(tokenizer).decode([1, 2, 3, 4]) == " hi€"
