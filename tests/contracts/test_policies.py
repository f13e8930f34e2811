"""The exported policy is complete (P04): every file that other programs need, and the same conversations in each."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from loopwright.engines.base import EngineConfig
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.inprocess.models import causal_model, tiny
from loopwright.engines.named_tokenizer import tokenizer_of
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer
from loopwright.gateway.sessions.template import family_of
from loopwright.ledger.ledger import Ledger
from loopwright.reports.training.model_card import model_card
from loopwright.trainers.export.chat_template import jinja_of
from loopwright.trainers.export.gguf import NotConvertible, write_gguf
from loopwright.trainers.export.policy_files import complete_policy
from loopwright.trainers.learners import LocalLearner
from tests.reports.test_training import Training
from tests.trainers.conftest import _one_thread  # noqa: F401  a fixture
from tests.trainers.factories import learner_of, samples

CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]},
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "A sum.",
        "tool_calls": [
            {"function": {"name": "add", "arguments": {"a": 2, "b": "ü"}}},
            {"function": {"name": "add", "arguments": '{"a": 1}'}},
        ],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    {"role": "user", "content": ""},
)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"a": "é"}}}, {"name": "other"})
OWN = (
    "{% for message in messages %}<|im_start|>[{{ message.role }}] {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant] {% endif %}"
)
SPECIALS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "json": ("<bos>", "<eos>"),
}


def tokenizer_with(specials: tuple[str, ...]) -> HubTokenizer:
    """A byte-level tokenizer with these special tokens."""
    description = json.loads(ByteTokenizer().hub_json())
    for token in description["added_tokens"]:
        del description["model"]["vocab"][token["content"]]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"] = [{"id": 300 + n, "content": name, **added} for n, name in enumerate(specials)]
    return HubTokenizer.from_text(json.dumps(description))


def export(directory: Path, engine: EngineConfig | None = None, **options) -> Path:
    """The policy of a learner after one update."""
    learner = learner_of("grpo", directory, lr=0.05, **options)
    learner.update(samples(), 1)
    local = LocalLearner(learner.settings, directory, in_process=True, learner=learner)
    policy, checkpoint = directory / "policy", directory / "step-000001"
    for path in (policy, checkpoint):
        path.mkdir()
    local.save(policy)
    local.write(checkpoint)
    complete_policy(policy, engine or EngineConfig(type="transformers"), 0.8, checkpoint, "# A card\n")
    return policy


# -- the files --------------------------------------------------------------------------------------------------------


def test_p04_a_policy_has_every_file_that_other_programs_need(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = export(tmp_path, lora={"r": 2})
    names = {path.name for path in policy.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {"tokenizer_config.json", "chat_template.jinja", "README.md", "adapter"}

    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why, 2?"}], add_generation_prompt=True, return_dict=False
    )
    ours = family_of("auto", ByteTokenizer())
    assert ids == [*ours.render({"role": "user", "content": "Why, 2?"}, first=True, tools=()), *ours.opening()]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, 256)
    settings = model.generation_config
    assert settings.eos_token_id == [257], "an answer ends where it ended in training"
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 0.8, 0, 1.0)


def test_p04_adapters_are_exported_beside_the_merged_weights(tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    policy = export(tmp_path, lora={"r": 2})
    ids = torch.arange(1, 40)[None]
    base = tiny(0, "sdpa")
    before = base(input_ids=ids).logits
    adapted = peft.PeftModel.from_pretrained(base, policy / "adapter")(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(policy)(input_ids=ids).logits
    assert (adapted - merged).abs().max() < 1e-4
    assert (adapted - before).abs().max() > 0.01
    (tmp_path / "plain").mkdir()
    assert not (export(tmp_path / "plain") / "adapter").exists()


def test_p04_a_template_that_the_run_has_chosen_replaces_the_models_own(tmp_path):
    source = tmp_path / "model"
    tiny(0, "sdpa").save_pretrained(source)
    source.joinpath("tokenizer.json").write_text(ByteTokenizer().hub_json())
    source.joinpath("tokenizer_config.json").write_text(json.dumps({"chat_template": OWN, "a": "é"}))
    own = export(tmp_path, model_name=str(source))
    assert tokenizer_of(str(own), own).chat_template.source == OWN
    assert not (own / "chat_template.jinja").exists()
    (tmp_path / "chosen").mkdir()
    engine = EngineConfig(type="transformers", template="chatml")
    policy = export(tmp_path / "chosen", engine, model_name=str(source))
    assert "<|im_start|>" in tokenizer_of(str(policy), policy).chat_template.source
    assert json.loads((policy / "tokenizer_config.json").read_text()) == {"a": "é"}


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("start", [0, 1], ids=["with a system message", "without"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "json", "json of chatml"])
def test_p04_the_exported_template_writes_what_the_policy_read_in_training(name, start, tools):
    tokenizer = tokenizer_with(SPECIALS[name.split()[-1]])
    template = family_of(name.split()[0], tokenizer)
    source = ChatTemplateSource(jinja_of(template, tokenizer))
    messages = CONVERSATION[start:]
    for length in range(1, len(messages) + 1):
        ids = [
            token
            for index, message in enumerate(messages[:length])
            for token in template.render(message, first=not index, tools=() if index else tools)
        ]
        assert source.render(messages[:length], tools, opens_turn=False) == tokenizer.decode(ids)
        opened = source.render(messages[:length], tools, opens_turn=True)
        assert opened == tokenizer.decode([*ids, *template.opening()])


def test_p04_the_model_card_states_data_steps_reward_and_audit(tmp_path):
    with closing(Ledger.create(tmp_path / "ledger.db")) as ledger:
        training = Training(ledger)
        training.train(1, updates=1.0, trained_episodes=4.0, episodes=4.0, mismatch_max=0.002)
        training.train(2, updates=1.0, trained_episodes=4.0, episodes=4.0, mismatch_max=1.3, staleness=0.5)
        card = model_card(ledger, "smollm2")
    assert card.startswith("---\nlibrary_name: transformers\n")
    for text in (
        "from `smollm2`",
        "2 of 20 steps, on 8 of its own rollouts",
        "- Training rollouts on `sums`: 8 of 2 tasks.",
        "Judger: `",
        "In 1 step without stale rollouts, recorded and recomputed logprobs of a token differed by at most 0.002",
        "loopwright audit",
    ):
        assert text in card


# -- GGUF -------------------------------------------------------------------------------------------------------------


def test_p04_a_gguf_file_has_the_weights_the_tokens_and_the_template(tmp_path):
    from gguf import GGUFReader

    policy = export(tmp_path)
    file = write_gguf(policy)
    assert sorted(policy.glob("*.gguf*")) == [file] == [policy / "policy.gguf"]
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.architecture"], fields["qwen2.block_count"]) == ("qwen2", 2)
    assert fields["tokenizer.ggml.eos_token_id"] == 257
    assert fields["tokenizer.chat_template"] == (policy / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.tokens"][-2:] == ["<|im_start|>", "<|im_end|>"]
    assert fields["tokenizer.ggml.token_type"][-3:] == [1, 3, 3]
    weights = {tensor.name: tensor.data for tensor in reader.tensors}
    model = causal_model(str(policy), policy)
    assert (weights["blk.1.attn_q.bias"] == model.model.layers[1].self_attn.q_proj.bias.detach().numpy()).all()
    assert len(weights) == len(model.state_dict())


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("config.json", {"architectures": ["MambaForCausalLM"]}, "it is a MambaForCausalLM"),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "positions are scaled",
        ),
        ("config.json", {"layer_types": ["sliding_attention"]}, "a sliding window"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "not byte-level BPE"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "in an unknown way"),
    ],
    ids=["architecture", "positions", "window", "tokenizer", "words"],
)
def test_p04_what_is_not_converted_is_named_with_the_converter_that_may(tmp_path, file, change, reason):
    policy = export(tmp_path)
    settings = policy / file
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(NotConvertible, match=rf"{reason}.*convert_hf_to_gguf\.py .*policy --outfile"):
        write_gguf(policy)
    assert not list(policy.glob("*gguf*"))
