"""Training runs: rollouts whose agent trains the policy, so that the engine must accept new weights."""

from typing import Any, ClassVar, Literal

from loopwright.rollouts.remote.gateway_config import TrialServerGatewayConfig
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.rollout import RolloutRun


class TrainingRun(RolloutRun):
    """A run with `[run.rollout]` whose agent trains the policy."""

    kind: ClassVar[Literal["training"]] = "training"

    def check(self, raw: dict[str, Any], checker: Checker) -> None:
        super().check(raw, checker)
        engine: Any = self.engine  # None if it is missing, which is a problem already
        if self.agent is None:
            return
        if isinstance(self.gateway, TrialServerGatewayConfig):
            checker.add("[run.gateway] type", '"server" takes no weights, so nothing can be trained; remove it.')
        elif engine is not None and not engine.takes_weights:
            message = f"{engine.type!r} takes no weights, so nothing can be trained"
            checker.add("[run.engine] type", f"{message}; transformers, vllm and sglang do.")
        elif engine is not None and engine.policy is None and getattr(self.agent, "model", None) is None:
            checker.add("[run.agent] model", f"is missing: engine {engine.type!r} does not say which model it has.")
