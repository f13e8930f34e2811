"""A tokenizer that the tests of integrations share."""

from typing import Any

from loopwright.engines.tokenizer import _ALPHABET, ByteTokenizer


def byte_tokenizer() -> Any:
    """The byte tokenizer in the form that external trainers need."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(_ALPHABET | dict(ByteTokenizer.specials), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_start|>")
    assert wrapped("añ")["input_ids"] == ByteTokenizer().encode("añ")
    return wrapped
