"""Models for the in-process engine: load them by name, check them, and update their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopwright.engines.base import EngineError
from loopwright.engines.inprocess.batch import Batch
from loopwright.engines.inprocess.kv_cache import ATTENTION, Rows, Shape, register
from loopwright.engines.inprocess.packing import pack
from loopwright.engines.named_tokenizer import model_location, stop_ids, tokenizer_of
from loopwright.engines.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from loopwright.engines.inprocess.engine import TransformersConfig

_CHECKED_TOKENS = 8


def load(config: "TransformersConfig", scenario_dir: Path) -> tuple[Any, Tokenizer, Batch, int]:
    """The model that a config names, ready to serve, and its longest context. EngineError if it cannot be."""
    model, tokenizer = load_plain(config, scenario_dir)
    pack(model)
    text = model.config.get_text_config()
    limit = text.max_position_embeddings
    max_context = min(config.max_context or limit, limit)
    shape = _shape(model, text, max_context)
    batch = Batch(
        model,
        shape,
        tokenizer,
        stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id),
        max_batch=config.max_batch,
        max_tokens=config.batch_bytes // shape.token_bytes,
        max_context=max_context,
        prefix_bytes=config.prefix_bytes,
    )
    if config.model not in ("tiny", "smollm2"):
        _check(model, shape, config.model)
    return model, tokenizer, batch, max_context


def load_plain(config: "TransformersConfig", scenario_dir: Path) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer, without batch and packed weights. EngineError if they cannot be loaded."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = causal_model(config.model, scenario_dir, seed=config.seed)
    tokenizer = tokenizer_of(config.model, scenario_dir)
    return model.to(device=config.device, dtype=getattr(torch, config.dtype)).eval().requires_grad_(False), tokenizer


def tiny(seed: int = 0, attention: str = ATTENTION) -> Any:
    """A small byte-level model with 0.25 million random weights."""
    register()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make: Any = Qwen2ForCausalLM
    config = Qwen2Config(
        vocab_size=ByteTokenizer.size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # with tied embeddings, a random model only repeats itself
        bos_token_id=None,
        eos_token_id=ByteTokenizer.specials["<|im_end|>"],
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(config)


def causal_model(name: str, scenario_dir: Path, *, seed: int = 0, attention: str = ATTENTION) -> Any:
    """The model of a name, for an engine or a learner. EngineError if it cannot be loaded."""
    register()
    if name == "tiny":
        return tiny(seed, attention)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    untyped_logging: Any = logging
    untyped_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_location(name, scenario_dir), attn_implementation=attention, dtype="auto"
        )
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"model {name!r} cannot be loaded: {error}") from error


def _shape(model: Any, text: Any, max_context: int) -> Shape:
    """The shape of the model's KV cache. EngineError for kinds of layers without one."""
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(f"a model with layers of type {', '.join(sorted(kinds))} cannot be served in process")
    if "sliding_attention" in kinds and window is not None and max_context > window:
        raise EngineError(f"this model attends to only {window} tokens: set max_context = {window} or less")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weight = next(model.parameters())
    return Shape(text.num_hidden_layers, heads, width, weight.dtype, weight.device)


@torch.inference_mode()
def _check(model: Any, shape: Shape, name: str) -> None:
    """EngineError unless decoding token by token gives the same logprobs as one forward pass."""
    ids = list(range(1, 1 + _CHECKED_TOKENS))
    rows = Rows(model, shape)
    rows.add()
    try:
        logits = [rows.forward([[token]])[0] for token in ids]
        expected = model(input_ids=torch.tensor([ids], device=shape.device), use_cache=False).logits[0]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise EngineError(f"model {name!r} cannot be served in process: {error}") from error
    logprobs, expected = torch.stack(logits).float().log_softmax(-1), expected.float().log_softmax(-1)
    # The mean over what would be sampled: tokens that never are have large rounding errors, above all after training.
    gap = ((logprobs - expected).abs() * expected.exp()).sum(-1).max().item()
    if not gap < (5e-3 if shape.dtype is torch.float32 else 0.3):
        raise EngineError(f"model {name!r} cannot be served in process: logprobs are off by {gap:.3g}")


def put_weights(model: Any, source: Mapping[str, Tensor] | Path) -> None:
    """Copy weights into a model, or raise EngineError and copy none. Tied weights may be named once."""
    weights = source if isinstance(source, Mapping) else _read(source)
    targets = model.state_dict()
    unknown = [name for name in weights if name not in targets]
    covered = {targets[name].data_ptr() for name in weights if name in targets}
    missing = [name for name, target in targets.items() if target.data_ptr() not in covered]
    misshapen = [name for name in weights if name in targets and weights[name].shape != targets[name].shape]
    for what, names in (("unknown", unknown), ("missing", missing), ("of another shape", misshapen)):
        if names:
            raise EngineError(f"these weights do not fit the model: {len(names)} {what}, such as {names[0]!r}")
    with torch.no_grad():  # not inference mode, which does not count writes in `_version`
        for name, weight in weights.items():
            targets[name].copy_(weight)


def _read(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors or torch file, or in a directory written by transformers."""
    from safetensors.torch import load_file

    files = [path]
    if path.is_dir():  # a checkpoint also holds the optimizer's state
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    weights: dict[str, Tensor] = {}
    try:
        for file in files:
            weights |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    except Exception as error:
        raise EngineError(f"weights in {path} cannot be read: {type(error).__name__}: {error}") from error
    if not weights:
        raise EngineError(f"there are no weights in {path}")
    return weights
