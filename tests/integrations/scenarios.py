"""A tokenizer that the tests of integrations share."""

from typing import Any

from loopwright.engines.tokenizer import ByteTokenizer


def byte_tokenizer() -> Any:
    """The byte tokenizer in the form that external trainers need."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(ByteTokenizer().hub_json())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_start|>")
    assert wrapped("añ")["input_ids"] == ByteTokenizer().encode("añ")
    return wrapped
