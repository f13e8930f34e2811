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

SHORTCUTS: dict[str, Callable[[], EngineConfig]] = {
    "scripted": ScriptedConfig,
    "tiny": lambda: TransformersConfig(model="tiny"),
    "smollm2": lambda: TransformersConfig(model="smollm2"),
}
"""Names without an address."""

ADDRESSED: dict[str, Callable[[str], EngineConfig]] = {
    "transformers": lambda model: TransformersConfig(model=model),
    # Not validated yet: the caller adds what else they need, such as a tokenizer.
    "vllm": lambda url: VllmConfig.model_construct({"url"}, url=url, tokenizer=""),
    "llamacpp": lambda url: LlamaCppConfig.model_construct({"url"}, url=url, tokenizer=""),
    "sglang": lambda url: SglangConfig.model_construct({"url"}, url=url, tokenizer=""),
}
"""Kinds whose name is followed by a colon and a URL or model."""


def engine_config(name: str) -> EngineConfig:
    """The config of a short name. An unknown name raises ValueError, which lists the known ones."""
    kind, colon, address = name.partition(":")
    if colon and address and kind in ADDRESSED:
        return ADDRESSED[kind](address)
    if name in SHORTCUTS:
        return SHORTCUTS[name]()
    raise ValueError(f"unknown engine {name!r}. {did_you_mean(name, [*SHORTCUTS, *(f'{k}:…' for k in ADDRESSED)])}")


def engine_of(name: str, scenario_dir: Path = Path()) -> Engine:
    """The engine of a short name, such as "tiny" or "smollm2"; close it after use.

    An engine behind a server also needs a tokenizer, so this raises ValueError: create it from its config instead.
    """
    shortcut = engine_config(name)
    config = type(shortcut).model_validate(shortcut.model_dump(exclude_unset=True))
    return engines.get(config.type)(config, scenario_dir)
