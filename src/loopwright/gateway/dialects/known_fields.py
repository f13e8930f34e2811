"""What happens to the fields of a request: each is honoured, refused by name, without effect, or ignored and named.

A field that changes what the policy is asked, or how it samples, is honoured or refused. What is in no table is
accepted, because real clients send many fields: it is recorded with the turn, and named in `x-loopwright-ignored`.
Neutral values (null, false, 0, empty) always pass.
"""

from collections.abc import Mapping
from typing import Any

from loopwright.gateway.dialects.fields import BadRequest, storable_json
from loopwright.gateway.dialects.sampling_fields import GUIDE_FIELDS

_MAX_VALUE_BYTES = 2048
"""A longer value of an ignored field is recorded by its length."""
_ENGINE = """model stream temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    logit_bias seed chat_template_kwargs return_token_ids structured_outputs"""
_NO_EFFECT = """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
    prompt_cache_options cache_control client_metadata request_id priority cache_salt guided_decoding_backend"""
_SAMPLERS = """min_tokens ignore_eos stop_token_ids include_stop_str_in_output bad_words allowed_token_ids
    use_beam_search logits_processors logits_processor custom_logit_processor no_repeat_ngram_size typical_p typical
    top_a tfs tfs_z top_n_sigma xtc_probability dry_multiplier mirostat mirostat_mode dynatemp_range epsilon_cutoff
    eta_cutoff smoothing_factor penalty_alpha length_penalty vllm_xargs thinking_token_budget"""
_PROMPT = "chat_template documents add_special_tokens truncate_prompt_tokens mm_processor_kwargs lora_path adapters"
_OUTPUT = "prompt_logprobs skip_special_tokens return_tokens_as_token_ids return_hidden_states"
_REFUSED = {
    **dict.fromkeys(_SAMPLERS.split(), "the engines have no such parameter"),
    **dict.fromkeys(_PROMPT.split(), "prompts are rendered with the model's own chat template"),
    **dict.fromkeys(_OUTPUT.split(), "ask for logprobs or return_token_ids, which are complete"),
    "best_of": "request n choices and select one yourself",
    "continue_final_message": "send it with a chat completion, or end the messages of Messages with the assistant's",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "n": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (-1,),
    "typical": (1,),
    "typical_p": (1,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
}
"""Values besides the empty ones that change nothing."""
_TOOL = "type name description parameters input_schema function format tools cache_control"
_FUNCTION_TYPES = (None, "function", "custom", "namespace")


class KnownFields:
    """The fields of one dialect, besides those of every dialect."""

    def __init__(self, honoured: str, refused: Mapping[str, str], no_effect: str = "") -> None:
        """The names that its parser reads; those it refuses, with the reason; and those without effect."""
        self.honoured = {*_ENGINE.split(), *GUIDE_FIELDS, *honoured.split()}
        self.no_effect = {*_NO_EFFECT.split(), *no_effect.split()}
        common = {name: reason for name, reason in _REFUSED.items() if name not in self.honoured}
        self.refused: Mapping[str, str] = {**common, **refused}

    def ignored(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that will be ignored, with their values. BadRequest for one that is refused."""
        ignored = {}
        for name, value in body.items():
            if name in self.honoured or name in self.no_effect or is_neutral(name, value):
                continue
            if name in self.refused:
                raise BadRequest(f"{name}: not supported: {self.refused[name]}", name)
            ignored[name] = recordable(value)
        return ignored


def is_neutral(name: str, value: Any) -> bool:
    """Whether a value of this field changes nothing."""
    if name == "skip_special_tokens" and isinstance(value, bool):
        return value
    return not value or value in _NEUTRAL.get(name, ())


def recordable(value: Any) -> Any:
    """A value as it is recorded with the turn."""
    try:
        size = len(storable_json(value, ""))
    except BadRequest:
        return "not recorded: cannot be written as JSON"
    return value if size <= _MAX_VALUE_BYTES else f"not recorded: {size} bytes"


def ignored_options(value: Any, name: str, *honoured: str) -> dict[str, Any]:
    """The options of a field with several of them that will be ignored, by path."""
    options = value.items() if isinstance(value, dict) else ()
    return {
        f"{name}.{option}": recordable(each)
        for option, each in options
        if option not in honoured and not is_neutral(option, each)
    }


def ignored_tool_fields(tools: Any) -> dict[str, Any]:
    """The fields of functions that will be ignored, by path, such as `tools.strict`."""
    ignored: dict[str, Any] = {}
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") in _FUNCTION_TYPES:
            function = tool.get("function")
            sent = {**tool, **(function if isinstance(function, dict) else {})}
            names = [name for name, value in sent.items() if value and name not in _TOOL.split()]
            ignored |= {f"tools.{name}": recordable(sent[name]) for name in names}
            ignored |= ignored_tool_fields(tool.get("tools"))
    return ignored
