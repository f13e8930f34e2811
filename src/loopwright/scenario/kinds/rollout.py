"""Rollout runs: an agent loop attempts tasks with a policy, and a judger scores the episodes."""

import logging
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.agents import rollout_agents
from loopwright.core.errors import Problem, did_you_mean
from loopwright.engines.base import EngineConfig, engines
from loopwright.execution.ray.options import RayOptions
from loopwright.execution.ray.system import RaySystem
from loopwright.execution.system import SystemConfig
from loopwright.rollouts.build import cluster_problems, fingerprint, rollout_env
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.pools.resources import overlap_problems
from loopwright.rollouts.remote.gateway_config import (
    EXTERNAL_ENGINE,
    GATEWAY_HOSTS,
    ExternalGatewayConfig,
    GatewayHostConfig,
    RayGatewayConfig,
    TrialServerGatewayConfig,
)
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.rollouts.tasks.sources import shared_tasks
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.base import BuildContext, RunKind
from loopwright.scenario.overrides import is_remote

log = logging.getLogger(__name__)
_MAX_REASONS = 20
"""How many of the tasks that are left out are named."""
_MEANINGLESS = {
    "workload": "a trial is a rollout there; give the workload its own [[run]]",
    "live": "a trial is a rollout there; give the live environment its own [[run]]",
    "reward": "the judger gives the reward; describe it under `judger`",
    "rewards": "a failed rollout is left out, not penalised; remove this",
    "env_params": "what differs between rollouts is in their tasks; remove this",
    "repeats": "the agent's `group_size` says how often a task is attempted",
    "cache": "rollouts are never answered from a cache; remove this",
    "confirm": "a policy is evaluated with [run.eval]; remove this",
    "noise": "what differs between rollouts is in their tasks; remove this",
    "fail": "failed rollouts are replaced; remove this",
}


def needs_rollout_agent(checker: Checker) -> None:
    """Report an agent that does not work on rollouts, or none."""
    able = ", ".join(rollout_agents.names())
    checker.add("[run.agent] type", f"a run with [run.rollout] needs an agent that works on rollouts: {able}.")


class RolloutRun(RunKind):
    """A run with `[run.rollout]` whose agent leaves the policy as it is."""

    kind: ClassVar[Literal["rollout", "training"]] = "rollout"
    needs: ClassVar[tuple[str, ...]] = ("rollout",)
    rollout: RolloutConfig
    engine: EngineConfig

    @classmethod
    def read_parts(cls, raw: dict[str, Any], checker: Checker) -> dict[str, Any]:
        parts: dict[str, Any] = {"rollout": checker.model("[run.rollout]", raw["rollout"], RolloutConfig)}
        parts["engine"] = checker.configured("[run.engine]", raw["engine"], engines)[1] if "engine" in raw else None
        parts["gateway"] = _gateway(raw["gateway"], checker) if "gateway" in raw else None
        if isinstance(parts["gateway"], ExternalGatewayConfig | TrialServerGatewayConfig):
            parts["engine"] = EXTERNAL_ENGINE
        parts["eval"] = checker.model("[run.eval]", raw["eval"], EvalConfig) if "eval" in raw else None
        return parts

    def check(self, raw: dict[str, Any], checker: Checker) -> None:
        self._check_tasks(checker)
        self.check_not_search(raw, checker)
        for key, instead in _MEANINGLESS.items():
            if key in raw:
                checker.add(f"[[run]] {key}", f"has no meaning in a run with [run.rollout]: {instead}.")
        self._check_gateway(raw, checker)
        self._check_placement(checker)
        agent = self.agent_class
        if agent is not None:
            checker.add_all("[run.agent]", agent.problems(self.agent, self.rollout, checker.directory))
        elif "agent" not in raw:
            needs_rollout_agent(checker)

    def _check_tasks(self, checker: Checker) -> None:
        held_out = self.eval.tasks if self.eval is not None else ()
        eval_problems = self.eval.problems(checker.directory) if self.eval is not None else []
        checker.add_all("[run.eval]", eval_problems)
        problems = self.rollout.problems(checker.directory, None if eval_problems else self.eval)
        checker.add_all("[run.rollout]", problems)
        if not held_out or eval_problems or problems:
            return
        if shared := shared_tasks(self.rollout.tasks, held_out, checker.directory):
            more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
            checker.add("[run.eval] tasks", f"{shared[0].id}{more} would be trained on as well; hold out other tasks.")

    def _check_gateway(self, raw: dict[str, Any], checker: Checker) -> None:
        trial_server = isinstance(self.gateway, TrialServerGatewayConfig)
        if "gateway" in raw and not is_remote(raw):
            checker.add("[run.gateway]", 'has no meaning without loop = { type = "remote" }.')
        loops = {each.loop_key: each.loop for each in self.rollout.settings(self.eval).values()}
        if trial_server and any(getattr(loop, "server", None) is None for loop in loops.values()):
            checker.add("[run.gateway] type", '"server" is for loops with `server`, a trial server.')
        elif isinstance(self.gateway, ExternalGatewayConfig) and is_remote(raw):
            for key in (key for key, loop in loops.items() if not loop.through_gateway):
                message = "needs an engine in the run; only remote loops can sample through an external gateway."
                checker.add_all("[run.rollout]", [Problem(key, message)])
        if trial_server or isinstance(self.gateway, ExternalGatewayConfig):
            if "engine" in raw:
                whose = "a trial server's" if trial_server else "an external"
                checker.add("[run.engine]", f"has no meaning with {whose} gateway, which has its own engines.")
        elif "engine" not in raw:
            checker.add("[run.engine]", 'is missing; it says what the policy runs on, such as type = "scripted".')

    def _check_placement(self, checker: Checker) -> None:
        checker.add_all("[run.rollout]", overlap_problems(self.rollout.resource_requests(self.gateway, self.eval)))
        if isinstance(checker.system, RayOptions):
            checker.add_all("[run.rollout]", checker.system.problems(self.kind))
        if not self.rollout.engines.workers:
            return
        remote = all(each.loop.through_gateway for each in self.rollout.settings(self.eval).values())
        if remote and not isinstance(self.gateway, RayGatewayConfig):
            message = 'has no meaning with this gateway, which has its own engine; set [run.gateway] type = "ray".'
            checker.add("[run.rollout] engines", message)

    def task_mix(self, seed: int, scenario_dir: Path) -> TaskMix:
        """The tasks that can be attempted here, in the order of this seed."""
        held_out = self.eval.tasks if self.eval else ()
        settings = self.rollout.settings(self.eval)
        return TaskMix.load(
            self.rollout.tasks,
            seed,
            scenario_dir,
            held_out,
            lambda source, task: settings[source].loop.refusal(task),
        )

    def build_env(self, context: BuildContext) -> RolloutEnv:
        tasks = self.task_mix(context.agent.seed, context.loaded.directory)
        for name, reason in islice(tasks.skipped.items(), _MAX_REASONS):
            log.warning("%s is left out: %s", name, reason)
        if tasks.skipped:
            log.warning("%d tasks are left out; %d can be attempted", len(tasks.skipped), len(tasks.prompts()))
        book = self.open_book(
            context,
            fingerprint(self.rollout, self.engine, tasks, context.loaded.directory, self.eval),
            objectives=RolloutEnv.objectives.labels,
            metrics=RolloutEnv.metric_names,
            workload={"type": "rollout"},
            rollout={
                "tasks": [source.label() for source in self.rollout.tasks],
                "skipped": {
                    "count": len(tasks.skipped),
                    "reasons": dict(islice(tasks.skipped.items(), _MAX_REASONS)),
                },
                "loop": self.rollout.loop.model_dump(mode="json"),
                "judger": self.rollout.judger.model_dump(mode="json"),
                "produce": self.rollout.produce.model_dump(mode="json"),
                "sources": {
                    name: own for name, each in self.rollout.settings(self.eval).items() if (own := each.as_json())
                },
                "engine": self.engine.model_dump(mode="json"),
                "group_size": getattr(context.agent, "group_size", 1),
                "min_group": getattr(context.agent, "min_size", 1),
            },
        )
        return rollout_env(
            book,
            self.rollout,
            self.engine,
            tasks,
            scenario_dir=context.loaded.directory,
            seed=context.agent.seed,
            gateway=self.gateway,
            evaluation=self.eval,
            ray=_ray_options(context.loaded.scenario.system),
        )

    def unreachable(self, system: SystemConfig) -> list[Problem]:
        requests = self.rollout.resource_requests(self.gateway, self.eval)
        options = _ray_options(system) or RaySystem()
        return cluster_problems(requests, options) if requests and options.named_address else []


def _ray_options(system: SystemConfig) -> RayOptions | None:
    return system if isinstance(system, RayOptions) else None


def _gateway(raw: Any, checker: Checker) -> GatewayHostConfig | None:
    kind = str(raw.get("type", "embedded")) if isinstance(raw, dict) else "embedded"
    if kind not in GATEWAY_HOSTS:
        checker.add("[run.gateway] type", f"unknown gateway {kind!r}. {did_you_mean(kind, list(GATEWAY_HOSTS))}")
        return None
    config: GatewayHostConfig | None = checker.model("[run.gateway]", raw, GATEWAY_HOSTS[kind])
    if config is not None:
        checker.add_all("[run.gateway]", config.problems(checker.directory))
    return config
