"""Fingerprints: whether two tokenizers, perhaps on two machines, give the same ids for the same text."""

from hashlib import blake2b

from loopwright.engines.tokenizer import Tokenizer

_IDS = (*range(1024), *range(1024, 2**18, 17))
"""Tokens that are looked at, among more than any vocabulary has; ids that are none decode alike everywhere."""
_TEXT = (
    "The quick brown fox's 1234567890 jumps…\n\n\tdef f(x):\r\n    return {'a': [x**2, \"b\"]}  # 3.14e-10\n"
    "Grüße, ça va? Привет, мир! 你好世界 こんにちは 안녕하세요 مرحبا שלום 🙂👩‍💻 <|im_start|> https://example.org/a?b=c&d"
)


def fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that have the same tokens, the same special ones, and cut a varied text alike."""
    facts = sorted(tokenizer.specials.items()), tokenizer.encode(_TEXT), [tokenizer.decode((each,)) for each in _IDS]
    return blake2b(repr(facts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
