"""Fingerprints: whether two tokenizers, perhaps on two machines, give the same ids for the same text."""

from hashlib import blake2b

from loopwright.engines.tokenizer import Tokenizer

_IDS = 2**18
"""More than any vocabulary that we know of; ids that are none decode alike everywhere."""
_TEXT = (
    "The quick brown fox's 1234567890 jumps…\n\n\tdef f(x):\r\n    return {'a': [x**2, \"b\"]}  # 3.14e-10\n"
    "Grüße, ça va? Привет, мир! 你好世界 こんにちは 안녕하세요 مرحبا שלום 🙂👩‍💻 <|im_start|> https://example.org/a?b=c&d"
)


def fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that have the same tokens, the same special ones, and cut a varied text alike."""
    digest = blake2b(repr((sorted(tokenizer.specials.items()), tokenizer.encode(_TEXT))).encode(), digest_size=16)
    decode = tokenizer.decode
    for start in range(0, _IDS, 4096):
        digest.update("\0".join(decode((token,)) for token in range(start, start + 4096)).encode("utf-8", "replace"))
    return digest.hexdigest()
