"""A policy as a GGUF file for llama.cpp, in single precision; `llama-quantize` makes smaller ones from it.

Models of the Llama and Qwen families with a byte-level tokenizer are converted here, with the names of the `gguf`
package. llama.cpp's own converter, which is not a package, knows many more.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopwright.core.errors import LoopwrightError, MissingExtra, storage
from loopwright.engines.named_tokenizer import end_ids_in

FILE = "policy.gguf"
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {f"{_WORDS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe", f"{_WORDS}\\p{{N}}{_REST}": "qwen2"}
"""How a tokenizer divides text into words, by llama.cpp's names."""


class NotConvertible(LoopwrightError):
    """The policy is of a kind that is not converted here."""

    def __init__(self, policy: Path, reason: str) -> None:
        super().__init__(
            f"{policy}: {reason}, which Loopwright does not convert to GGUF. llama.cpp's own converter may: "
            f"python convert_hf_to_gguf.py {policy} --outfile {policy / FILE}"
        )


def write_gguf(policy: Path) -> Path:
    """Convert a policy in transformers format; the file stands beside its weights, complete or not at all."""
    try:
        import gguf
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtra("the GGUF format", "train") from error
    config, tokenizer = json.loads((policy / "config.json").read_bytes()), _Vocabulary(policy)
    architecture = _architecture(policy, config)
    heads = int(config["num_attention_heads"])
    rotated_heads = {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}
    target, part = policy / FILE, policy / f".{FILE}"
    with storage(policy):
        writer = gguf.GGUFWriter(part, architecture)
        _write_settings(writer, config, policy.absolute().parent.name)
        tokenizer.write(writer, int(config["vocab_size"]))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
        for file in sorted(policy.glob("model*.safetensors")):
            for name, weight in load_file(file).items():
                if (gguf_name := names.get_name(name, (".weight", ".bias"))) is None:
                    raise NotConvertible(policy, f"it has weights {name!r}")
                values = weight.float()
                if architecture == "llama" and (rows := rotated_heads.get(name.split(".")[-2])):
                    # transformers concatenates the two halves of a rotation, llama.cpp interleaves them.
                    values = values.reshape(rows, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
                writer.add_tensor(gguf_name, values.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.rename(target)
    return target


def _architecture(policy: Path, config: Mapping[str, Any]) -> str:
    """llama.cpp's name of the model's architecture."""
    name = (config.get("architectures") or ["?"])[0]
    if name not in _ARCHITECTURES:
        raise NotConvertible(policy, f"it is a {name}")
    if (kind := _rope(config).get("rope_type", "default")) != "default":
        raise NotConvertible(policy, f"its positions are scaled ({kind})")
    if "sliding_attention" in (config.get("layer_types") or ()) or (
        name.startswith("Mistral") and config.get("sliding_window")
    ):
        raise NotConvertible(policy, "it has layers with a sliding window")
    return _ARCHITECTURES[name]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of rotary positions; before version 5, transformers wrote `rope_theta` beside them."""
    old = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    return config.get("rope_parameters") or old


def _write_settings(writer: Any, config: Mapping[str, Any], name: str) -> None:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_name(name)
    writer.add_file_type(0)  # single precision
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


class _Vocabulary:
    """A byte-level tokenizer in llama.cpp's terms."""

    def __init__(self, policy: Path) -> None:
        from tokenizers import Tokenizer

        file = policy / "tokenizer.json"
        description = json.loads(file.read_bytes()) if file.is_file() else {"model": {}}
        self._model = description["model"]
        if self._model.get("type") != "BPE" or "ByteLevel" not in json.dumps(description["pre_tokenizer"]):
            raise NotConvertible(policy, "its tokenizer is not byte-level BPE")
        self._pre = _pre_tokenizer(description["pre_tokenizer"])
        if self._pre is None:
            raise NotConvertible(policy, "its tokenizer divides text into words in an unknown way")
        self._added = description["added_tokens"]
        self._ids = {**self._model["vocab"], **{token["content"]: token["id"] for token in self._added}}
        tokenizer = Tokenizer.from_file(str(file))
        self._begins = tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids
        settings = policy / "tokenizer_config.json"
        self._names = json.loads(settings.read_bytes()) if settings.is_file() else {}
        end_ids = end_ids_in(policy)
        self._ends = [end_ids] if isinstance(end_ids, int) else end_ids or []
        template = policy / "chat_template.jinja"
        self._template = template.read_text() if template.is_file() else self._names.get("chat_template")

    def write(self, writer: Any, size: int) -> None:
        """Write it for a model with this many embeddings."""
        from gguf import TokenType

        kinds = dict.fromkeys(self._model["vocab"].values(), TokenType.NORMAL)
        for token in self._added:
            kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens = {number: text for text, number in self._ids.items()}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self._pre)
        writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
        writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in range(size)])
        merges = self._model["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
        writer.add_add_bos_token(self._begins)
        for name in ("bos", "eos", "unk", "pad"):
            if (number := self._ids.get(self._name(f"{name}_token"))) is not None:
                getattr(writer, f"add_{name}_token_id")(number)
        eos = self._ids.get(self._name("eos_token"))
        if eos is None and self._ends:
            writer.add_eos_token_id(self._ends[0])
        if others := [number for number in self._ends if number != eos]:
            writer.add_eot_token_id(others[-1])
        if isinstance(self._template, str):
            writer.add_chat_template(self._template)

    def _name(self, key: str) -> Any:
        token = self._names.get(key)
        return token.get("content") if isinstance(token, dict) else token


def _pre_tokenizer(description: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how the tokenizer divides text into words; None if unknown."""
    parts = description["pretokenizers"] if description["type"] == "Sequence" else [description]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1]["use_regex"]:
        return _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
    return None
