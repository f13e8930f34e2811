"""Live runs: an agent steps an environment that a server holds. The spaces and the reward come from the server."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from loopwright.agents import agents
from loopwright.agents.search.base import SearchAgent
from loopwright.agents.search.grid_random import RandomPolicy, RandomSearch
from loopwright.core.agent import Agent
from loopwright.core.errors import Problem, ScenarioError
from loopwright.core.imports import import_function
from loopwright.core.trial import key_of
from loopwright.envs.live.address import Address
from loopwright.envs.live.campaign_env import LiveCampaignEnv
from loopwright.envs.live.config import LiveConfig
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import make_server
from loopwright.execution.system import SystemConfig
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.base import BuildContext, RunKind
from loopwright.spaces.space import Draws

_CONNECT_TIMEOUT_S = 3.0


class LiveRun(RunKind):
    """A run with `[run.live]`."""

    kind: ClassVar[Literal["live"]] = "live"
    needs: ClassVar[tuple[str, ...]] = ("live",)
    live: LiveConfig

    @classmethod
    def read(cls, raw: dict[str, Any], agent: type[Agent] | None, checker: Checker) -> "RunKind | None":
        # In a live run `random` is a policy: a space of points to search does not exist.
        return super().read(raw, RandomPolicy if agent is RandomSearch else agent, checker)

    @classmethod
    def read_parts(cls, raw: dict[str, Any], checker: Checker) -> dict[str, Any]:
        return {"live": checker.model("[run.live]", raw["live"], LiveConfig)}

    def check(self, raw: dict[str, Any], checker: Checker) -> None:
        if self.live.env_class is None and self.live.address is None and not checker.has_server:
            checker.add("[run.live]", "names no environment: give env_class or address, or pass server=… in Python.")
        checker.add_all("[run.live]", self.live.problems(checker.directory, self.env_params.keys()))
        checker.add_all("[run.live]", checker.system.problems(self.kind))
        if "workload" in raw:
            checker.add("[run.workload]", "a run has a workload or a live environment, not both.")
        if [function.type for function in self.reward] not in ([], ["server"]):
            checker.add("[[run]] reward", 'a live environment gives its own reward: reward = { type = "server" }.')
        for key in ("repeats", "cache", "confirm", "noise", "fail"):
            if key in raw:
                checker.add(f"[[run]] {key}", "has no meaning in a live run, which measures every step once.")
        self.check_not_rollout(raw, checker)
        self.check_not_search(raw, checker)
        agent = self.agent_class
        if agent is None and "agent" not in raw:
            checker.add("[run.agent]", "is missing; a live environment needs an agent that acts in it.")
        elif agent is not None and not agent.steps_live:
            able = ", ".join(name for name in agents.names() if agents.get(name).steps_live)
            kind = raw["agent"]["type"]
            own = " If its loop does, set steps_live = True in its class." if ":" in kind else ""
            checker.add("[run.agent] type", f"{kind!r} cannot act in a live environment; {able} can.{own}")
        elif agent is not None:
            spaces = self.live.spaces(checker.directory, self.env_params.keys())
            checker.add_all("[run.agent]", agent.problems(self.agent, spaces.action_space, checker.directory))
            observed = spaces.observation_space
            if observed is not None and (reason := agent.observation_problem(observed)):
                checker.add("[run.live]", f"{reason}.")
            checker.add_all("[run.agent]", agent.too_little(self.agent, None, parallel=self.live.envs))
            if self.live.envs > 1 and getattr(self.agent, "library", None) != "sb3":
                checker.add("[run.live] envs", "several environments need an RL agent with library = 'sb3'; remove it.")
            self.check_draws(raw, self.live.args, checker)
            self._check_evaluation(checker)

    def _check_evaluation(self, checker: Checker) -> None:
        """Report an evaluation without a separate environment, and videos without an evaluation."""
        evaluates = getattr(self.agent, "evaluation", None) is not None
        if evaluates and checker.has_server:
            reason = "needs a second environment, but server=… is one object; name its class in [run.live] env_class."
            checker.add("[run.agent] evaluate", reason)
        if self.live.render_mode and not evaluates:
            reason = "shows episodes of evaluations; set evaluate = { every = 5000, episodes = 20 } in [run.agent]."
            checker.add("[run.live] render_mode", reason)

    def unreachable(self, system: SystemConfig) -> list[Problem]:
        if self.live.address is None:
            return []
        try:
            Address.parse(self.live.address).connect(_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reason = f"no server answers at {self.live.address} ({error.strerror or error}). Start it before the run."
            return [Problem("[run.live] address", reason)]
        return []

    def build_env(self, context: BuildContext) -> LiveEnv | LiveCampaignEnv:
        live = self.live
        book = self.open_book(
            context,
            key_of(live.env_class, live.address, live.fixed(), *live.changes()),
            objectives=LiveEnv.objectives.labels,
            metrics=LiveEnv.metric_names,
        )
        if context.server is not None and live.envs > 1:
            raise ScenarioError(
                context.loaded.label,
                [Problem("[run.live] envs", f"{live.envs} environments need a class, not one object.")],
            )
        draws = Draws(context.agent.seed, live.args, self.env_params)
        directory = context.loaded.directory
        if context.server is not None:
            servers = [make_server(context.server, {}, directory)]
        else:
            servers = live.connect(directory, self.env_params.keys())
        first: LiveEnv | None = None
        make: Callable[..., LiveEnv] = context.env or LiveEnv
        if self.env is not None and context.env is None:
            make = import_function(self.env, directory)
        for server in servers:
            env = make(
                book,
                server=server,
                draws=draws,
                penalties=self.rewards,
                record=live.record,
                timeout_s=live.timeout_s if context.server is not None or not live.has_deadlines else None,
                first=first,
            )
            first = first or env
        assert first is not None  # noqa: S101  there is at least one
        if context.server is None:
            one, directory = live.model_copy(update={"envs": 1}), context.loaded.directory
            renders = live.render_mode is not None
            first.make_server = lambda: one.connect(directory, self.env_params.keys(), renders=renders)[0]
        context.resources.callback(first.close)
        book.when_ended = first.close  # an agent with its own loop may leave it open
        is_campaign = context.agent_class is not None and issubclass(context.agent_class, SearchAgent)
        return LiveCampaignEnv(first, context.agent.seed) if is_campaign else first
