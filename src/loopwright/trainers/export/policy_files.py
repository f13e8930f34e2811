"""The files beside a policy's weights: tokenizer, chat template, generation config, adapters and model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from loopwright.core.errors import storage
from loopwright.engines.base import EngineConfig
from loopwright.engines.named_tokenizer import BYTE_TOKENIZER_FILE, end_ids_in, model_location, stop_ids, tokenizer_of
from loopwright.engines.tokenizer import ByteTokenizer, Tokenizer
from loopwright.gateway.sessions.model_template import template_of
from loopwright.gateway.sessions.template import FamilyTemplate
from loopwright.trainers.export.chat_template import jinja_of

ADAPTER = "adapter"
"""The folder of a policy's adapters: beside the merged weights, transformers would load them on top."""
_TOKENIZER_FILES = ("*token*.json", "chat_template*", "vocab.*", "merges.txt", "*.model")
_TOKEN_IDS = ("bos_token_id", "pad_token_id")


def add_tokenizer(model: str, scenario_dir: Path, directory: Path) -> None:
    """Copy the model's tokenizer into a directory."""
    if model == "tiny" or (scenario_dir / model / BYTE_TOKENIZER_FILE).is_file():
        (directory / BYTE_TOKENIZER_FILE).write_text(f"{ByteTokenizer.size}\n")
        (directory / "tokenizer.json").write_text(ByteTokenizer().hub_json())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
        return
    source = Path(model_location(model, scenario_dir))
    if not source.is_dir():  # a name on the hub, which transformers has downloaded
        from transformers import AutoTokenizer

        if not (directory / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(model).save_pretrained(directory)
        return
    for file in (file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)):
        (directory / file.name).write_bytes(file.read_bytes())


def complete_policy(policy: Path, engine: EngineConfig, temperature: float, checkpoint: Path, card: str) -> None:
    """Add what other programs need to answer as the policy did in training. `checkpoint` is that of the last step."""
    tokenizer = tokenizer_of(str(policy.absolute()), policy)
    with storage(policy):
        _write_chat_template(policy, engine, tokenizer)
        _write_generation_config(policy, tokenizer, temperature)
        shutil.rmtree(policy / ADAPTER, ignore_errors=True)
        if adapters := sorted(checkpoint.glob("adapter_*")):
            (policy / ADAPTER).mkdir()
            for file in adapters:
                shutil.copy(file, policy / ADAPTER)
        (policy / "README.md").write_text(card)


def _write_chat_template(policy: Path, engine: EngineConfig, tokenizer: Tokenizer) -> None:
    """Write the template of the run's engine, unless it is the model's own."""
    template = template_of(engine.template, tokenizer)
    if not isinstance(template, FamilyTemplate):
        return
    (policy / "chat_template.jinja").write_text(jinja_of(template, tokenizer))
    (policy / "chat_template.json").unlink(missing_ok=True)
    settings = policy / "tokenizer_config.json"
    if settings.is_file() and (own := json.loads(settings.read_bytes())).pop("chat_template", None) is not None:
        settings.write_text(json.dumps(own, indent=2, ensure_ascii=False))


def _write_generation_config(policy: Path, tokenizer: Tokenizer, temperature: float) -> None:
    """Answers end where they ended in training, and are sampled as they were: without the model's own defaults."""
    file = policy / "generation_config.json"
    own: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    ends = sorted(stop_ids(tokenizer, end_ids_in(policy)))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    token_ids = {name: own[name] for name in _TOKEN_IDS if own.get(name) is not None}
    file.write_text(json.dumps({**token_ids, "eos_token_id": ends, **sampling}, indent=2) + "\n")
