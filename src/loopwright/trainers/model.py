"""The policy of a learner: a model of which all weights, the last layers, or adapters are trained."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopwright.engines.inprocess.models import causal_model
from loopwright.engines.named_tokenizer import model_location
from loopwright.trainers.config import LoraConfig, TrainConfig
from loopwright.trainers.failure import TrainingFailed, wrong_checkpoint
from loopwright.trainers.shards import gather, local_part, shard

_TOLERANCE = 1e-3
_MODEL, _ADAPTERS = "model.safetensors", "adapter_model.safetensors"


class ScoringModel(nn.Module):
    """Computes logprobs, entropy and values of sampled tokens. This is the module that is trained."""

    def __init__(self, model: Any, *, critic: bool) -> None:
        super().__init__()
        self.model = model
        self.critic = nn.Linear(model.config.get_text_config().hidden_size, 1) if critic else None
        if self.critic is not None:
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    def forward(self, ids: Tensor, mask: Tensor, temperature: float, entropy_grad: bool) -> tuple[Tensor, ...]:
        """Logprob, entropy and, with a critic, value of each token that `mask` selects, row by row.

        Rows are padded at the end, so with causal attention no mask is needed.
        """
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        before = hidden[mask[:, 1:]]  # the position that predicts each token
        logits = self.model.get_output_embeddings()(before).float()
        if temperature != 1.0:
            logits = logits / temperature
        total = logits.logsumexp(-1)
        logprobs = logits.gather(-1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0] - total
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return (logprobs, entropy) if self.critic is None else (logprobs, entropy, self.critic(before.float())[:, 0])


class Policy:
    """The trained model, and how to load, save and publish it."""

    def __init__(
        self, config: TrainConfig, model: str, scenario_dir: Path, *, critic: bool, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.config = config
        # Without dropout, as the engine samples.
        self.model: Any = causal_model(model, scenario_dir, seed=seed, attention="sdpa").float().eval()
        _check(self.model, model)
        for parameter in self.model.parameters():
            parameter.requires_grad_(config.lora is None and config.layers is None)
        self._adapters: Any = None
        if config.lora is not None:
            self._adapters = _adapt(self.model, config.lora, config.seed)
            self._adapters.base_model_name_or_path = model_location(model, scenario_dir)
        elif config.layers is not None:
            _unfreeze(self.model, config.layers)
        self.module = ScoringModel(self.model, critic=critic)
        if config.shard:
            lists = [part for part in self.model.base_model.children() if isinstance(part, nn.ModuleList)]
            shard(self.module, [layer for part in lists for layer in part], device)
        else:
            self.module.to(device)
        self._initial: dict[str, Tensor] | None = None
        if config.kl and config.lora is None:
            self._initial = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @contextmanager
    def initial_weights(self) -> Iterator[None]:
        """Within the context, the policy has its weights from before training."""
        if self._initial is None:
            adapters = [module for module in self.model.modules() if hasattr(module, "lora_A")]
            for module in adapters:
                module.enable_adapters(False)
            try:
                yield
            finally:
                for module in adapters:
                    module.enable_adapters(True)
            return
        self._exchange(self._initial)
        try:
            yield
        finally:
            self._exchange(self._initial)

    @torch.no_grad()
    def _exchange(self, others: dict[str, Tensor]) -> None:
        """Swap weights with others; in place, because shards are read in place."""
        for name, parameter in self.model.named_parameters():
            if name in others:
                current = parameter.detach().clone()
                parameter.copy_(others[name])
                others[name].copy_(current)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def write(self, directory: Path) -> None:
        """Write a checkpoint: the model in transformers format, or its adapters in peft format."""
        if self.config.lora is None:
            self.save(directory)
            return
        save_file({name: value.contiguous() for name, value in self.adapters().items()}, directory / _ADAPTERS)
        self._adapters.save_pretrained(str(directory))

    def adapters(self) -> dict[str, Tensor]:
        """The weights of the adapters by their names in peft."""
        return gather({_peft_name(name): p for name, p in self.model.named_parameters() if p.requires_grad})

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Load a checkpoint. Raises TrainingFailed if it does not fit."""
        lora = self.config.lora is not None
        file = directory / (_ADAPTERS if lora else _MODEL)
        weights = load_file(file) if file.is_file() else {}
        targets = {
            _peft_name(name) if lora else name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        if wrong := [n for n, p in targets.items() if n not in weights or weights[n].shape != p.shape]:
            raise wrong_checkpoint(directory, wrong[0])
        for name, parameter in targets.items():
            parameter.copy_(local_part(weights[name], parameter))

    def weights(self) -> dict[str, Tensor]:
        """All weights by the model's names, with merged adapters, as an engine loads them. They are not copied."""
        return gather(weights_of(self.model))

    def save(self, directory: Path) -> None:
        """Write the full model in transformers format, with merged adapters."""
        save_model(self.model, self.weights(), directory)


@torch.no_grad()
def weights_of(model: Any) -> dict[str, Tensor]:
    """All weights of a model by its names, with merged adapters. They are not copied."""
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" in name:
            continue
        if plain != name and name.endswith(".weight"):
            module = model.get_submodule(name.removesuffix(".base_layer.weight"))
            value = value + module.get_delta_weight("default")
        weights[plain] = value.detach()
    return weights


def save_model(model: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write a model with these weights in transformers format."""
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if is_tied else set()
    untied = {name: value.contiguous() for name, value in weights.items() if name not in tied}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(untied, directory / _MODEL, metadata={"format": "pt"})
    config = copy.deepcopy(model.config)  # as the weights are: a base in bfloat16 is trained in single precision
    config.dtype = next(iter(untied.values())).dtype
    config.architectures = config.architectures or [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _adapt(model: Any, config: LoraConfig, seed: int) -> Any:
    """Add adapters, which at first change nothing. Returns their peft config."""
    import peft

    layers = model.config.get_text_config().num_hidden_layers
    matrices = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [name for name in config.targets if name not in matrices]:
        names = ", ".join(sorted(matrices))
        raise TrainingFailed(f"lora.targets: the model has no matrix {missing[0]!r}; choose among: {names}.")
    adapted_layers = None if config.layers is None else list(range(max(0, layers - config.layers), layers))
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=cast("int", config.scale * config.r),  # a float works, too
        target_modules=list(config.targets),
        layers_to_transform=adapted_layers,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(lora, model)
    return lora


def _peft_name(name: str) -> str:
    """The name of an adapter's weights in peft's files."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def _unfreeze(model: Any, layers: int) -> None:
    for name, module in model.base_model.named_children():
        if isinstance(module, nn.ModuleList):
            for layer in module[-layers:]:
                layer.requires_grad_(True)
        elif "norm" in name:
            module.requires_grad_(True)


@torch.no_grad()
def _check(model: Any, name: str) -> None:
    """TrainingFailed for models that change their logits after the last matrix, which we do not reproduce."""
    ids = torch.arange(1, 9)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits
    if not (ours - theirs).abs().max().item() < _TOLERANCE:
        raise TrainingFailed(
            f"model {name!r} changes its logits after the last matrix, which training does not support. "
            "Choose another model."
        )
