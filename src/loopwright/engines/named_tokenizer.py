"""What belongs to a model by its name: its directory, its tokenizer, and the tokens that end a turn."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopwright.engines.base import EngineError
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.inprocess import smollm2
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer

BYTE_TOKENIZER_FILE = "byte_tokenizer"
"""Marks the directory of a model that reads bytes and has no tokenizer files."""
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")


def model_location(name: str, scenario_dir: Path) -> str:
    """Where a model is loaded from: a directory, or a name on the hub."""
    if name == "smollm2":
        return str(smollm2.directory())
    return str(scenario_dir / name) if (scenario_dir / name).is_dir() else name


def tokenizer_of(name: str, scenario_dir: Path) -> Tokenizer:
    """The tokenizer of a model: `smollm2`, `tiny`, `bytes`, a directory, or a name on the hub."""
    if name in ("bytes", "tiny") or (scenario_dir / name / BYTE_TOKENIZER_FILE).is_file():
        return ByteTokenizer()
    location = model_location(name, scenario_dir)
    try:
        return HubTokenizer.load(location, ChatTemplateSource.load(location))
    except EngineError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise EngineError(f"the tokenizer of model {name!r} cannot be loaded: {error}") from error


def stop_ids(tokenizer: Tokenizer, end_ids: int | list[int] | None = None) -> frozenset[int]:
    """The tokens that end a turn: those that the model's files name, and the usual ends of messages and texts."""
    ids = set(end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids])
    return frozenset(ids | {number for name, number in tokenizer.specials.items() if name in _END_TOKENS})


def end_ids_in(directory: Path) -> Any:
    """The end tokens in the files of a model's directory, one or a list; None if they name none."""
    for name in ("generation_config.json", "config.json"):
        with suppress(OSError, ValueError, AttributeError):
            if (end_ids := json.loads((directory / name).read_bytes()).get("eos_token_id")) is not None:
                return end_ids
    return None
