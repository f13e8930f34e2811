"""What every trainer can be told; what only one algorithm knows stands beside it."""

from typing import Any, Literal

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config


class LoraConfig(Config):
    """Low-rank adapters: a small part of the weights learns, the rest stays."""

    r: int = Field(default=8, ge=1)
    """The rank of each adapter."""
    alpha: float | None = Field(default=None, gt=0)
    """How strongly adapters count: their output is multiplied with alpha / r. Twice the rank by default."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The names of the matrices that get one."""
    layers: int | None = Field(default=None, ge=1)
    """How many layers have adapters, counted from the last; all by default."""

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied with."""
        return (2 * self.r if self.alpha is None else self.alpha) / self.r


class TrainConfig(AgentConfig):
    """What every trainer can be told."""

    steps: int = Field(ge=1)
    """How many batches are trained on; each gives the policy a new version."""
    prompts_per_step: int = Field(default=8, ge=1)
    """How many prompts make a batch."""
    group_size: int = Field(default=8, ge=1)
    """How many rollouts attempt the same prompt."""
    lr: float = Field(default=1e-5, gt=0)
    """The step size, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the step size falls over the steps."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the step size rises to `lr`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """How fast weights shrink by themselves (AdamW)."""
    betas: tuple[float, float] = (0.9, 0.99)
    """How slowly the means of gradients and of their squares change (AdamW)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened to this."""
    epochs: int = Field(default=1, ge=1)
    """How often a batch is gone through."""
    minibatches: int = Field(default=1, ge=1)
    """Into how many parts a batch is split; the weights change after each."""
    micro_tokens: int = Field(default=2048, ge=1)
    """Tokens, padding included, that go through the model at a time; gradients are summed up. Bounds the memory."""
    kl: float = Field(default=0.0, ge=0)
    """How much moving away from the policy of the beginning costs."""
    entropy: float = Field(default=0.0, ge=0)
    """How much undecidedness is worth; a little keeps a small policy from settling too early."""
    importance: float = Field(default=2.0, ge=0)
    """The most that a token counts when today's policy finds it likelier than the one that sampled it, against the
    logprobs that were recorded; 0 to count all alike."""
    model: str | None = None
    """What is trained, in the words of the `transformers` engine; the engine's own model by default."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    layers: int | None = Field(default=None, ge=1)
    """Train only so many layers, counted from the last, and the norm after them; not with `lora`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The precision of the computation; weights are kept in float32."""
    colocated: bool = False
    """Whether the engine rests while the policy is trained, for the cores or the GPU that they share; asynchronous
    rollouts go on where they were."""
    workers: int = Field(default=0, ge=0)
    """0: train in this process; otherwise so many workers of Ray Train, which share each batch."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of each of these workers."""
    gpus: float = Field(default=0, ge=0, le=1)
    """What each of these workers has of a GPU; 0 to train on CPUs."""
    shard: bool = False
    """Whether each of these workers, two at least, holds only a part of the weights and of what the optimizer remembers
    (FSDP); otherwise each holds all of it."""
    device: str | None = None
    """Where this process trains, as torch names it; where the engine of this process runs by default."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps between two checkpoints; a killed run repeats the steps since the last one, from recorded rollouts."""
    keep: int = Field(default=2, ge=1)
    """How many checkpoints are kept."""
    bad_steps: int = Field(default=3, ge=1)
    """After so many steps in a row whose loss or gradient is no number, training stops."""
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where curves are written besides the ledger; each needs its package installed."""

    def model_post_init(self, _: Any) -> None:
        """Refuse what would be ignored: whoever set it believes that it counts."""
        if self.lora is not None and self.layers is not None:
            raise ValueError("`layers` is for training without `lora`; say `lora = { layers = … }`")
        if not self.workers and (ignored := self.model_fields_set & {"cpus", "gpus"}):
            raise ValueError(f"`{min(ignored)}` is for `workers` of Ray Train; here, `device` says where to train")
        if self.shard and self.workers < 2:
            raise ValueError(
                "`shard` divides the model among `workers` of Ray Train: set 2 of them at least, or remove it"
            )
        if self.workers and self.device is not None:
            raise ValueError("`device` is for training in this process; `workers` have `cpus` and `gpus`")
