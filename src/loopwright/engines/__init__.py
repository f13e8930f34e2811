"""Engines: token ids in, a stream of token ids with logprobs out."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.engines.base import (
        BadSampling,
        Chunk,
        ContextFull,
        Engine,
        EngineAway,
        EngineConfig,
        EngineError,
        Sampling,
        engines,
    )
    from loopwright.engines.fleet import Fleet, FleetConfig
    from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk
    from loopwright.engines.http.client import EngineGone, HttpClient
    from loopwright.engines.http.llamacpp import LlamaCppConfig, LlamaCppEngine
    from loopwright.engines.http.sglang import SglangConfig, SglangEngine
    from loopwright.engines.http.vllm import VllmConfig, VllmEngine
    from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine
    from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
    from loopwright.engines.shortcuts import engine_of
    from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer
    from loopwright.engines.weight_update import WeightUpdate

__all__ = [
    "BadSampling",
    "ByteTokenizer",
    "Chunk",
    "ContextFull",
    "Engine",
    "EngineAway",
    "EngineConfig",
    "EngineError",
    "EngineGone",
    "Fleet",
    "FleetConfig",
    "HttpClient",
    "HttpConfig",
    "HttpEngine",
    "HubTokenizer",
    "LlamaCppConfig",
    "LlamaCppEngine",
    "RawChunk",
    "Sampling",
    "ScriptedConfig",
    "ScriptedEngine",
    "SglangConfig",
    "SglangEngine",
    "Tokenizer",
    "TransformersConfig",
    "TransformersEngine",
    "VllmConfig",
    "VllmEngine",
    "WeightUpdate",
    "engine_of",
    "engines",
]

__getattr__ = lazy_exports(__name__)
