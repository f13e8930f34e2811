"""Builds a rollout environment: its pools of loop workers and judgers, in this process or on Ray."""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.config import overridden
from loopwright.core.errors import MissingExtra, Problem
from loopwright.core.trial import key_of
from loopwright.engines.base import EngineConfig, engines
from loopwright.execution.ray.options import RayOptions
from loopwright.execution.ray.system import RaySystem
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.config import RolloutConfig, distinct, part_name
from loopwright.rollouts.env import PolicySource, RolloutEnv, SourceRunner
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers import JudgerClient, JudgeWorker
from loopwright.rollouts.judgers.base import JudgerConfig
from loopwright.rollouts.loops.base import LoopConfig
from loopwright.rollouts.loops.worker import LoopWorker
from loopwright.rollouts.pools.base import Pool, Worker
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.named import combine_pools
from loopwright.rollouts.pools.resources import PlacementConfig, ResourceRequest
from loopwright.rollouts.remote.config import RemoteConfig, server_token
from loopwright.rollouts.remote.gateway_config import (
    EmbeddedGatewayConfig,
    ExternalGatewayConfig,
    GatewayHostConfig,
    TrialServerGatewayConfig,
)
from loopwright.rollouts.remote.gateway_host import (
    RESTART_S,
    EmbeddedGatewayHost,
    ExternalGatewayHost,
    GatewayAccess,
    GatewayHost,
    check_reachable,
)
from loopwright.rollouts.remote.gateway_pool import GatewayPool, Probe
from loopwright.rollouts.remote.worker import RemoteWorker
from loopwright.rollouts.source_settings import SourceSettings
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.workloads.base import fingerprint_of

if TYPE_CHECKING:
    from loopwright.rollouts.build_ray import RayBuilder

_NOT_FINGERPRINTED = {
    *PlacementConfig.model_fields,
    *("concurrency", "timeout_s", "retries", "pause_s", "breaker", "cooldown_s"),
    *("server", "token_file", "queue_s", "artifacts"),
}
"""Settings that change where and how fast rollouts run, but not their results."""


def fingerprint(
    config: RolloutConfig,
    engine: EngineConfig,
    tasks: TaskMix,
    scenario_dir: Path,
    evaluation: EvalConfig | None = None,
) -> str:
    """Changes with everything that makes rollouts incomparable: tasks, loop, judger, engine, and the code they name."""
    parts = {
        "loop": comparable(config.loop),
        "judger": comparable(config.judger),
        "engine": engine.model_dump(mode="json"),
    }
    default = {**parts, "sampling": config.loop.sampling.model_dump(mode="json")}
    settings = {name: comparable_settings(each) for name, each in config.settings(evaluation).items()}
    own = {name: each for name, each in settings.items() if any(default[key] != value for key, value in each.items())}
    text = orjson.dumps([parts, *([own] if own else []), tasks.fingerprint()]).decode()
    modules = {scenario_dir / f"{module.replace('.', '/')}.py" for module in re.findall(r'"([\w.]+):[\w.]+"', text)}
    return fingerprint_of(text, *sorted(module for module in modules if module.is_file()))


def comparable_settings(settings: SourceSettings) -> dict[str, Any]:
    """What makes the rollouts of one source incomparable with others, as plain data."""
    sampling = overridden(settings.loop.sampling, settings.sampling)
    return {
        "loop": comparable(settings.loop),
        "judger": comparable(settings.judger),
        "sampling": sampling.model_dump(mode="json"),
    }


def comparable(config: PlacementConfig) -> dict[str, Any]:
    """A loop or judger as plain data, without the settings that do not change results, also of judgers inside it."""
    data = config.model_dump(mode="json", exclude=_NOT_FINGERPRINTED)
    for name in data:
        match getattr(config, name):
            case PlacementConfig() as member:
                data[name] = comparable(member)
            case tuple(members) if any(isinstance(member, PlacementConfig) for member in members):
                data[name] = [comparable(member) for member in members]
            case Mapping() as members if any(isinstance(member, PlacementConfig) for member in members.values()):
                data[name] = {key: comparable(member) for key, member in members.items()}
    return data


def rollout_env(
    book: TrialBook,
    config: RolloutConfig,
    engine: EngineConfig,
    tasks: TaskMix,
    *,
    scenario_dir: Path,
    seed: int,
    gateway: GatewayHostConfig | None = None,
    evaluation: EvalConfig | None = None,
    ray: RayOptions | None = None,
) -> RolloutEnv:
    """Build the environment of a rollout run."""
    ray = ray or RaySystem()
    loops = [loop for pool in config.loop_pools(evaluation).values() for loop in pool.values()]
    gateway = (gateway or EmbeddedGatewayConfig()) if any(loop.through_gateway for loop in loops) else None
    in_process = all(
        isinstance(gateway, EmbeddedGatewayConfig)
        if loop.through_gateway
        else not loop.workers and not config.engines.workers
        for loop in loops
    )
    sources = _source_runners(config, evaluation, engine, tasks, scenario_dir, ray)
    cluster: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    if requests := config.resource_requests(gateway, evaluation):  # a pool needs Ray
        cluster = partial(ray_builder("[run.rollout]", ray, scenario_dir).connected, requests)
    return RolloutEnv(
        book,
        tasks=tasks,
        loop=_LoopBuilder(book, config, engine, gateway, scenario_dir, ray).build(evaluation),
        judger=next(iter(sources.values())).judger,
        sources=sources,
        produce=config.produce,
        seed=seed,
        source=PolicySource(
            engine, config.loop.sampling, scenario_dir, in_process=engine.type == "transformers" and in_process
        ),
        evaluation=evaluation,
        cluster=cluster,
    )


def _source_runners(
    config: RolloutConfig,
    evaluation: EvalConfig | None,
    engine: EngineConfig,
    tasks: TaskMix,
    scenario_dir: Path,
    ray: RayOptions,
) -> dict[str, SourceRunner]:
    """What runs and judges the rollouts of each source. Equal judgers are built once."""
    settings = config.settings(evaluation)
    loop_names = distinct(config.loop, {name: each.loop for name, each in settings.items()})[1]
    judgers, judger_names = distinct(config.judger, {name: each.judger for name, each in settings.items()})
    clients = {
        name: build_judger_client(judger, scenario_dir, ray, part_name("judger", name))
        for name, judger in judgers.items()
    }
    pools = {loop: pool for pool, loops in config.loop_pools(evaluation).items() for loop in loops}
    slots: dict[tuple[str, int], asyncio.Semaphore] = {}
    runners = {}
    for name, each in settings.items():
        loop = each.loop
        facts = {"engine": engine.model_dump(mode="json"), "tasks": tasks.fingerprint([name])}
        runners[name] = SourceRunner(
            clients[judger_names[name]],
            # Loops that share their workers share the slots, too, unless one has its own limit.
            slots.setdefault((pools[loop_names[name]], loop.concurrency), asyncio.Semaphore(loop.concurrency)),
            loop.concurrency,
            loop.total_s + (loop.queue_s if isinstance(loop, RemoteConfig) and loop.server else 0.0),
            loop_names[name],
            each.sampling,
            each.source.produce,
            key_of({**facts, **comparable_settings(each)}),
        )
    return runners


class _LoopBuilder:
    """Builds the workers of a run's loops: each with its own engine, or with engines or a gateway that they share."""

    def __init__(
        self,
        book: TrialBook,
        config: RolloutConfig,
        engine: EngineConfig,
        gateway: GatewayHostConfig | None,
        scenario_dir: Path,
        ray: RayOptions,
    ) -> None:
        self._book, self._config, self._engine, self._gateway = book, config, engine, gateway
        self._scenario_dir, self._ray = scenario_dir, ray
        self._placement = config.engine_placement(gateway)

    def build(self, evaluation: EvalConfig | None) -> Pool:
        """One pool, which gives each request to the workers of its loop."""
        local: dict[str, dict[str, LoopConfig]] = {}
        remote: dict[str, RemoteConfig] = {}
        for name, loops in self._config.loop_pools(evaluation).items():
            first = next(iter(loops.values()))
            if isinstance(first, RemoteConfig):
                remote[name] = first
            else:
                local[name] = loops
        pools = self._build_local(local) if local else {}
        if remote and self._gateway is not None:
            settings = self._config.settings(evaluation).values()
            tested = [s.loop for s in settings if "verifier" in s.judger.required_evidence()]
            directory, name = self._scenario_dir, self._book.name
            host = build_gateway_host(self._gateway, self._engine, directory, name, self._placement, self._ray)
            run_id = str(self._book.ledger.state("id"))  # the same after a resume, so that no trial runs twice
            pool = build_remote_pool(remote, host, directory, tested=tested, run=name, run_id=run_id, ray=self._ray)
            pools |= dict.fromkeys(remote, pool)
        return combine_pools(pools)

    def _build_local(self, pools: Mapping[str, Mapping[str, LoopConfig]]) -> dict[str, Pool]:
        """Loops that drive the policy themselves, each pool by the names of its loops."""
        if not self._config.engines.workers:
            return self._pools_of(pools, partial(LoopWorker.build, engine=self._engine))
        what = f"engines with workers = {self._placement.workers}"
        builder = ray_builder(what, self._ray, self._scenario_dir)
        engines = builder.engines(self._engine, self._book.name, self._placement)
        return builder.loops_with(engines, partial(self._pools_of, pools))

    def _pools_of(
        self, pools: Mapping[str, Mapping[str, LoopConfig]], build: Callable[..., LoopWorker]
    ) -> dict[str, Pool]:
        by_loop: dict[str, Pool] = {}
        for name, loops in pools.items():
            capacity, first = max(loop.concurrency for loop in loops.values()), next(iter(loops.values()))
            worker, title = partial(build, loops), part_name("loop", name)
            pool = build_pool(title, worker, first, self._scenario_dir, capacity=capacity, ray=self._ray)
            by_loop |= dict.fromkeys(loops, pool)
        return by_loop


def build_remote_pool(
    loops: Mapping[str, RemoteConfig],
    host: GatewayHost | None,
    scenario_dir: Path,
    *,
    tested: Sequence[LoopConfig],
    run: str,
    run_id: str,
    ray: RayOptions | None = None,
) -> Pool:
    """The workers of remote loops and their gateway: in this process, on Ray, or on a trial server.

    The tasks' tests run after the agents of the loops in `tested`. `host` is None if a trial server has the gateway.
    """
    pools: dict[str, Pool] = {}
    probes: list[Probe] = [check_reachable] if any(loop.workers for loop in loops.values()) else []
    for name, loop in loops.items():
        # Read here, where the run was started: workers on other machines do not have these variables.
        passed_env = {name: os.environ[name] for name in loop.pass_env if name in os.environ}
        common: dict[str, Any] = {"run": run, "passed_env": passed_env, "run_tests": loop in tested}
        if loop.server is not None:
            from loopwright.rollouts.trial_server.client import TrialServerClient, TrialServerWorker

            token = server_token(loop.token_file, scenario_dir)
            client = TrialServerClient(loop.server, token, connections=2 * loop.concurrency)
            pools[name] = LocalPool(partial(TrialServerWorker, client, loop, run_id=run_id, **common), name="loop")
            probes.append(client.check)
            continue
        sessions = None if loop.workers or host is None else host.local_sessions()
        build = partial(RemoteWorker, loop, sessions=sessions, **common)
        title = part_name("loop", name)
        pools[name] = build_pool(title, build, loop, scenario_dir, capacity=loop.concurrency, ray=ray)

    async def probe_all(url: str) -> None:
        for probe in probes:
            await probe(url)

    return GatewayPool(host, combine_pools(pools), probe_all if probes else None)


def cluster_problems(requests: Sequence[ResourceRequest], ray: RayOptions) -> list[Problem]:
    """Why the pools of a run could not be placed on the cluster that is named; asked by `loopwright verify`."""
    return ray_builder("[run.rollout]", ray, Path()).problems(requests)


def ray_builder(what: str, options: RayOptions | None, scenario_dir: Path) -> "RayBuilder":
    """What builds the parts that are on Ray; `what` needs it."""
    if find_spec("ray") is None:
        raise MissingExtra(what, "ray")
    from loopwright.rollouts.build_ray import RayBuilder  # late, since it imports Ray

    return RayBuilder(options or RaySystem(), scenario_dir)


def build_judger_client(
    config: JudgerConfig, scenario_dir: Path, ray: RayOptions | None = None, name: str = "judger"
) -> JudgerClient:
    """The client of a judger, in this process or on Ray, and of those of its parts that have their own workers."""
    placements = config.placements(name)
    placed = {key: part for key, part in placements.items() if part.workers and part is not config}
    parts = [build_judger_client(part, scenario_dir, ray, key) for key, part in placed.items()]
    build = partial(JudgeWorker.build, config, parts=parts)
    pool = build_pool(name, build, config, scenario_dir, capacity=config.capacity(), ray=ray)
    return JudgerClient(pool, config, parts)


def build_pool(
    name: str,
    build: Callable[..., Worker],
    config: PlacementConfig,
    scenario_dir: Path,
    *,
    capacity: int,
    ray: RayOptions | None = None,
) -> Pool:
    """`workers = 0`: in this process; otherwise on Ray, with up to `capacity` calls per worker at a time.

    `build` takes `scenario_dir`, which may be another one on other nodes.
    """
    if config.workers == 0:
        return LocalPool(partial(build, scenario_dir=scenario_dir), name=name)
    return ray_builder(f"{name} with workers = {config.workers}", ray, scenario_dir).pool(name, build, config, capacity)


def build_gateway_host(
    config: GatewayHostConfig,
    engine: EngineConfig,
    scenario_dir: Path,
    name: str,
    placement: PlacementConfig | None = None,
    ray: RayOptions | None = None,
) -> GatewayHost | None:
    """The host that a configuration describes; `placement` is that of the engines of a gateway on Ray.

    None if the trial server uses its own gateway.
    """
    if isinstance(config, TrialServerGatewayConfig):
        return None
    if isinstance(config, ExternalGatewayConfig):
        return ExternalGatewayHost(GatewayAccess(config.url, config.token(scenario_dir), RESTART_S))
    if isinstance(config, EmbeddedGatewayConfig):
        return EmbeddedGatewayHost(config, lambda: engines.get(engine.type)(engine, scenario_dir))
    builder = ray_builder("a gateway on Ray", ray, scenario_dir)
    return builder.gateway_host(config, builder.engines(engine, name, placement or PlacementConfig(workers=1)))
