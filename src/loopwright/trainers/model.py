"""The policy as a learner has it: a model whose weights can change, all of them, the last layers, or adapters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopwright.engines.inprocess.models import causal_model
from loopwright.engines.named_tokenizer import model_location
from loopwright.trainers.algorithm import PolicyOutput
from loopwright.trainers.config import LoraConfig, TrainConfig
from loopwright.trainers.failure import TrainingFailed, foreign
from loopwright.trainers.shards import gathered, held, shard

_TOLERANCE = 1e-3
_MODEL, _ADAPTERS = "model.safetensors", "adapter_model.safetensors"


class Scored(nn.Module):
    """A model that tells what it thinks of tokens that were sampled. The one module that is trained, here or on Ray."""

    def __init__(self, model: Any, *, critic: bool) -> None:
        super().__init__()
        self.model = model
        self.critic = nn.Linear(model.config.get_text_config().hidden_size, 1) if critic else None
        if self.critic is not None:
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    def forward(self, ids: Tensor, mask: Tensor, temperature: float, undecided: bool) -> tuple[Tensor, ...]:
        """Logprob, entropy and, with a critic, value of each token that `mask` picks, row by row.

        Rows are padded at their end, which nothing before it attends to: no attention mask is needed.
        """
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        before = hidden[mask[:, 1:]]  # where each of them was decided on
        logits = self.model.get_output_embeddings()(before).float()
        if temperature != 1.0:
            logits = logits / temperature
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0] - total
        with torch.set_grad_enabled(undecided and torch.is_grad_enabled()):
            entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return (logprobs, entropy) if self.critic is None else (logprobs, entropy, self.critic(before.float())[:, 0])


class Policy:
    """What is trained, and the ways in and out of it."""

    def __init__(
        self, config: TrainConfig, model: str, home: Path, *, critic: bool, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.config = config
        # Without dropout: the engine samples without, and what it sampled is what is learned from.
        self.hub: Any = causal_model(model, home, seed=seed, attention="sdpa").float().eval()
        _check(self.hub, model)
        for parameter in self.hub.parameters():
            parameter.requires_grad_(config.lora is None and config.layers is None)
        self._adapters: Any = None
        if config.lora is not None:
            self._adapters = _adapt(self.hub, config.lora, config.seed)
            self._adapters.base_model_name_or_path = model_location(model, home)
        elif config.layers is not None:
            _unfreeze(self.hub, config.layers)
        self.scored = Scored(self.hub, critic=critic)
        if config.shard:
            shard(self.scored, _layers(self.hub), device)
        else:
            self.scored.to(device)
        self._first: dict[str, Tensor] | None = None
        if config.kl and config.lora is None:
            self._first = {name: p.detach().clone() for name, p in self.hub.named_parameters() if p.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        """What learns."""
        return [parameter for parameter in self.scored.parameters() if parameter.requires_grad]

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Within, the policy is as it was before training."""
        if self._first is None:
            adapters = [module for module in self.hub.modules() if hasattr(module, "lora_A")]
            for module in adapters:
                module.enable_adapters(False)
            try:
                yield
            finally:
                for module in adapters:
                    module.enable_adapters(True)
            return
        self._exchange(self._first)
        try:
            yield
        finally:
            self._exchange(self._first)

    @torch.no_grad()
    def _exchange(self, others: dict[str, Tensor]) -> None:
        """Swap weights with others; in place, since shards are read where they lie."""
        for name, parameter in self.hub.named_parameters():
            if name in others:
                kept = parameter.detach().clone()
                parameter.copy_(others[name])
                others[name].copy_(kept)

    def learned(self) -> dict[str, nn.Parameter]:
        """What changes by training, by name."""
        return {name: value for name, value in self.scored.named_parameters() if value.requires_grad}

    def write(self, directory: Path) -> None:
        """A checkpoint of what was learned, as transformers loads it: the model, or its adapters as peft has them."""
        if self.config.lora is None:
            self.save(directory)
            return
        save_file({name: value.contiguous() for name, value in self.adapters().items()}, directory / _ADAPTERS)
        self._adapters.save_pretrained(str(directory))

    def adapters(self) -> dict[str, Tensor]:
        """The weights of the adapters, as peft names them."""
        return gathered({_as_peft(name): p for name, p in self.hub.named_parameters() if p.requires_grad})

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Take on what was written there."""
        lora = self.config.lora is not None
        file = directory / (_ADAPTERS if lora else _MODEL)
        found = load_file(file) if file.is_file() else {}
        places = {_as_peft(name) if lora else name: p for name, p in self.hub.named_parameters() if p.requires_grad}
        if wrong := [n for n, p in places.items() if n not in found or found[n].shape != p.shape]:
            raise foreign(directory, wrong[0])
        for name, parameter in places.items():
            parameter.copy_(held(found[name], parameter))

    def weights(self) -> dict[str, Tensor]:
        """All weights under the model's own names, adapters folded in: what an engine takes. They are not copied."""
        return gathered(weights_of(self.hub))

    def save(self, directory: Path) -> None:
        """The whole model as transformers writes and loads it, adapters folded in."""
        save_model(self.hub, self.weights(), directory)


@torch.no_grad()
def weights_of(model: Any) -> dict[str, Tensor]:
    """All weights of a model under its own names, adapters folded in. They are not copied."""
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" in name:
            continue
        if plain != name and name.endswith(".weight"):
            adapted = model.get_submodule(name.removesuffix(".base_layer.weight"))
            value = value + adapted.get_delta_weight("default")
        found[plain] = value.detach()
    return found


def save_model(model: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """A model with these weights, as transformers writes and loads it."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if _is_tied(model) else set()
    kept = {name: value.contiguous() for name, value in weights.items() if name not in tied}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(kept, directory / _MODEL, metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def said(scored: Any, ids: Tensor, mask: Tensor, temperature: float, *, undecided: bool) -> PolicyOutput:
    """What a module thinks of the tokens that `mask` picks."""
    return PolicyOutput(*scored(ids, mask, temperature, undecided))


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _adapt(model: Any, config: LoraConfig, seed: int) -> Any:
    """Put adapters beside the matrices; at first they change nothing. Returns what peft calls their config."""
    import peft

    layers = model.config.get_text_config().num_hidden_layers
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [name for name in config.targets if name not in known]:
        found = ", ".join(sorted(known))
        raise TrainingFailed(f"lora.targets: the model has no matrix {missing[0]!r}; choose among its own: {found}.")
    chosen = None if config.layers is None else list(range(max(0, layers - config.layers), layers))
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=cast("int", config.scale * config.r),  # it is multiplied with
        target_modules=list(config.targets),
        layers_to_transform=chosen,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(lora, model)
    return lora


def _as_peft(name: str) -> str:
    """What peft calls the weights of an adapter in its files."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def _layers(model: Any) -> list[nn.Module]:
    return [layer for one in model.base_model.children() if isinstance(one, nn.ModuleList) for layer in one]


def _unfreeze(model: Any, layers: int) -> None:
    for name, module in model.base_model.named_children():
        if isinstance(module, nn.ModuleList):
            for layer in module[-layers:]:
                layer.requires_grad_(True)
        elif "norm" in name:
            module.requires_grad_(True)


@torch.no_grad()
def _check(model: Any, name: str) -> None:
    """Models that do more to their logits than the last matrix would be trained on the wrong ones."""
    ids = torch.arange(1, 9)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits
    if not (ours - theirs).abs().max().item() < _TOLERANCE:
        raise TrainingFailed(
            f"model {name!r} changes its logits after the last matrix, and would be trained on the wrong ones. "
            "Choose another model."
        )
