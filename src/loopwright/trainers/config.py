"""Settings of every trainer; those of one algorithm are in its own file."""

from typing import Any, Literal

from pydantic import Field

from loopwright.core.config import Config
from loopwright.rollouts.config import RolloutAgentConfig


class LoraConfig(Config):
    """Low-rank adapters (LoRA): train few weights and freeze the rest."""

    r: int = Field(default=8, ge=1)
    """The rank of each adapter."""
    alpha: float | None = Field(default=None, gt=0)
    """Adapter outputs are multiplied by alpha / r. Twice the rank by default."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The names of the matrices that get an adapter."""
    layers: int | None = Field(default=None, ge=1)
    """How many layers have adapters, counted from the last; all by default."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return (2 * self.r if self.alpha is None else self.alpha) / self.r


class TrainConfig(RolloutAgentConfig):
    """Settings of every trainer."""

    steps: int = Field(ge=1)
    """Number of training steps; each trains on one batch and gives the policy a new version."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts per batch."""
    lr: float = Field(default=1e-5, gt=0)
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays over the steps."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to `lr`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.99)
    """The betas of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are clipped to this."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass: the batch is split into this many parts."""
    micro_tokens: int = Field(default=2048, ge=1)
    """Tokens per forward pass, padding included; gradients are accumulated. Bounds the memory."""
    kl: float = Field(default=0.0, ge=0)
    """The weight of the KL divergence from the initial policy."""
    entropy: float = Field(default=0.0, ge=0)
    """The weight of the entropy bonus; a little keeps a small policy from converging too early."""
    importance: float = Field(default=2.0, ge=0)
    """The upper limit of a token's importance weight: its probability under the current policy over the recorded one.
    0 weights all tokens alike."""
    model: str | None = None
    """The model to train, named as in the `transformers` engine; by default the engine's model."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    layers: int | None = Field(default=None, ge=1)
    """Train only this many of the last layers, and the norm after them; not with `lora`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision of the computation; weights stay in float32."""
    colocated: bool = False
    """Whether the engine is paused during training, because both share the cores or the GPU; asynchronous rollouts
    continue afterwards."""
    workers: int = Field(default=0, ge=0)
    """0 trains in this process; otherwise the number of Ray Train workers, which share each batch."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs per worker."""
    gpus: float = Field(default=0, ge=0, le=1)
    """GPUs per worker, or the fraction of one; 0 trains on CPUs."""
    shard: bool = False
    """Whether weights and optimizer state are sharded over the workers (FSDP), of which there must be at least two;
    otherwise each worker holds all of them."""
    device: str | None = None
    """The torch device of training in this process; by default that of the engine in this process."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps between checkpoints; a killed run repeats the steps since the last one from recorded rollouts."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep."""
    bad_steps: int = Field(default=3, ge=1)
    """Training stops after this many steps in a row with a non-finite loss or gradient."""
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where curves are written besides the ledger; each needs its package."""

    def model_post_init(self, _: Any) -> None:
        """Refuse settings that would have no effect."""
        if self.lora is not None and self.layers is not None:
            raise ValueError("`layers` is for training without `lora`; write `lora = { layers = … }`")
        if not self.workers and (ignored := self.model_fields_set & {"cpus", "gpus"}):
            raise ValueError(
                f"`{min(ignored)}` is for `workers` of Ray Train; set `device` to choose where this process trains"
            )
        if self.shard and self.workers < 2:
            raise ValueError(
                "`shard` divides the model among `workers` of Ray Train: set at least 2 of them, or remove it"
            )
        if self.workers and self.device is not None:
            raise ValueError("`device` is for training in this process; `workers` have `cpus` and `gpus`")
