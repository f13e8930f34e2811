"""Tokenizers by name, `smollm2`, `bytes`, a directory or a name on the hub, and the tokens that end a turn."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopwright.engines.base import EngineError
from loopwright.engines.inprocess import smollm2
from loopwright.engines.tokenizer import ByteTokenizer, Tokenizer

BYTES = "byte_tokenizer"
"""A file that says that a model reads bytes, and has no tokenizer of its own."""
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")


def place(name: str, home: Path) -> str:
    """Where a model is found: a directory, or its name on the hub."""
    return str(smollm2.directory()) if name == "smollm2" else str(home / name) if (home / name).is_dir() else name


def tokenizer_of(name: str, home: Path) -> Tokenizer:
    """The tokenizer that belongs to a model. EngineError if it cannot be had."""
    if name in ("bytes", "tiny") or (home / name / BYTES).is_file():
        return ByteTokenizer()
    from loopwright.engines.hub_tokenizer import HubTokenizer

    try:
        return HubTokenizer.of(place(name, home))
    except EngineError:
        raise
    except Exception as error:  # tokenizers raises nothing more particular
        raise EngineError(f"the tokenizer of model {name!r} cannot be loaded: {error}") from error


def stop_ids(tokenizer: Tokenizer, ends: Any = None) -> frozenset[int]:
    """The tokens that end a turn: those that the model names, one or several, and the ends of messages and texts."""
    found = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return frozenset(found | {number for name, number in tokenizer.specials.items() if name in _ENDS})


def ends_in(directory: Path) -> Any:
    """What the files of a model say about its last token."""
    for name in ("generation_config.json", "config.json"):
        with suppress(OSError, ValueError, AttributeError):
            if (ends := json.loads((directory / name).read_bytes()).get("eos_token_id")) is not None:
                return ends
    return None
