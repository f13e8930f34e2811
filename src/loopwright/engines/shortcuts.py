"""Engines by short names, as the command line takes them: `scripted`, `tiny`, `smollm2`, or `kind:address`."""

from collections.abc import Callable
from pathlib import Path

from loopwright.core.errors import did_you_mean
from loopwright.engines.base import Engine, EngineConfig, engines
from loopwright.engines.http.llamacpp import LlamaCppConfig
from loopwright.engines.http.sglang import SglangConfig
from loopwright.engines.http.vllm import VllmConfig
from loopwright.engines.inprocess.engine import TransformersConfig
from loopwright.engines.scripted import ScriptedConfig

NAMED: dict[str, Callable[[], EngineConfig]] = {
    "scripted": ScriptedConfig,
    "tiny": lambda: TransformersConfig(model="tiny"),
    "smollm2": lambda: TransformersConfig(model="smollm2"),
}
"""Names that stand for themselves."""

ADDRESSED: dict[str, Callable[[str], EngineConfig]] = {
    "transformers": lambda model: TransformersConfig(model=model),
    # Not yet checked: what else they need, such as a tokenizer, is said elsewhere.
    "vllm": lambda url: VllmConfig.model_construct({"url"}, url=url, tokenizer=""),
    "llamacpp": lambda url: LlamaCppConfig.model_construct({"url"}, url=url, tokenizer=""),
    "sglang": lambda url: SglangConfig.model_construct({"url"}, url=url, tokenizer=""),
}
"""Kinds that take what follows their colon: a URL, or a model."""


def engine_config(name: str) -> EngineConfig:
    """The config that a name stands for; ValueError says which there are."""
    kind, colon, rest = name.partition(":")
    if colon and rest and kind in ADDRESSED:
        return ADDRESSED[kind](rest)
    if name in NAMED:
        return NAMED[name]()
    known = [*NAMED, *(f"{each}:…" for each in ADDRESSED)]
    raise ValueError(f"unknown engine {name!r}. {did_you_mean(name, known)}")


def engine_of(name: str, home: Path = Path()) -> Engine:
    """The engine that a name stands for, such as "tiny" or "smollm2"; close it when it is done with.

    One behind a server has to be told its tokenizer, too: ValueError. Make it of its config.
    """
    named = engine_config(name)
    config = type(named).model_validate(named.model_dump(exclude_unset=True))
    return engines.get(config.type)(config, home)
