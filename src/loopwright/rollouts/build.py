"""Builds a rollout environment: its pools of loop workers and judgers, in this process or on Ray."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import ClusterError, MissingExtra, Problem
from loopwright.engines.base import EngineConfig, engines
from loopwright.execution.ray.options import RayOptions
from loopwright.execution.ray.system import RaySystem
from loopwright.ledger.groups import Groups
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.env import PolicySource, RolloutEnv
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers import JudgerClient, JudgeWorker
from loopwright.rollouts.judgers.base import JudgerConfig
from loopwright.rollouts.loops.base import LoopConfig
from loopwright.rollouts.loops.worker import LoopWorker
from loopwright.rollouts.pools.actor_host import build_below
from loopwright.rollouts.pools.base import Pool, Worker
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.resources import PlacementConfig, ResourceRequest, ResourcesError
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
    TrialServerGatewayHost,
    check_reachable,
)
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from loopwright.rollouts.remote.worker import RemoteWorker
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.workloads.base import fingerprint_of

_POLL_S = 0.5
_NOT_FINGERPRINTED = {
    *PlacementConfig.model_fields,
    *("concurrency", "timeout_s", "retries", "pause_s", "breaker", "cooldown_s"),
    *("server", "token_file", "queue_s", "artifacts"),
}
"""Settings that change where and how fast rollouts run, but not their results."""


def fingerprint(config: RolloutConfig, engine: EngineConfig, tasks: TaskMix, scenario_dir: Path) -> str:
    """Changes with everything that makes rollouts incomparable: tasks, loop, judger, engine, and the code they name."""
    parts = {
        "loop": config.loop.model_dump(mode="json", exclude=_NOT_FINGERPRINTED),
        "judger": config.judger.model_dump(mode="json", exclude=_NOT_FINGERPRINTED),
        "engine": engine.model_dump(mode="json"),
    }
    text = orjson.dumps([parts, tasks.fingerprint()]).decode()
    modules = {scenario_dir / f"{module.replace('.', '/')}.py" for module in re.findall(r'"([\w.]+):[\w.]+"', text)}
    return fingerprint_of(text, *sorted(module for module in modules if module.is_file()))


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
    loop, ray = config.loop, ray or RaySystem()
    gateway = (gateway or EmbeddedGatewayConfig()) if isinstance(loop, RemoteConfig) else None
    alone = not loop.workers and not config.engines.workers
    in_process = alone if gateway is None else isinstance(gateway, EmbeddedGatewayConfig)
    return RolloutEnv(
        book,
        tasks=tasks,
        loop=_build_loop(book, config, engine, gateway, scenario_dir, ray),
        judger=build_judger_client(config.judger, scenario_dir, ray),
        buffer=Groups(book.ledger),
        produce=config.produce,
        seed=seed,
        concurrency=loop.concurrency,
        deadline_s=loop.total_s + (loop.queue_s if isinstance(loop, RemoteConfig) and loop.server else 0.0),
        source=PolicySource(
            engine, loop.sampling, scenario_dir, in_process=engine.type == "transformers" and in_process
        ),
        evaluation=evaluation,
        cluster=partial(_cluster, config.resource_requests(gateway), ray),
    )


def _build_loop(
    book: TrialBook,
    config: RolloutConfig,
    engine: EngineConfig,
    gateway: GatewayHostConfig | None,
    scenario_dir: Path,
    ray: RayOptions,
) -> Pool:
    """The loop's workers, each with its own engine, or all with engines or a gateway that they share."""
    loop, placement = config.loop, config.engine_placement(gateway)
    if isinstance(loop, RemoteConfig) and gateway is not None:
        host = build_gateway_host(gateway, engine, scenario_dir, book.name, placement, ray)
        run_id = str(book.ledger.state("id"))  # the same after a resume, so that no trial runs twice
        return build_remote_pool(config, loop, host, scenario_dir, run=book.name, run_id=run_id, ray=ray)
    if placement.workers:
        return _shared_engine_loop(loop, engine, placement, scenario_dir, book.name, ray)
    own_engine = partial(LoopWorker.build, loop, engine)
    return build_pool("loop", own_engine, loop, scenario_dir, capacity=loop.concurrency, ray=ray)


def _shared_engine_loop(
    loop: LoopConfig, engine: EngineConfig, placement: PlacementConfig, scenario_dir: Path, name: str, ray: RayOptions
) -> Pool:
    """A loop whose workers share engines in Ray actors."""
    if find_spec("ray") is None:
        raise MissingExtra(f"engines with workers = {placement.workers}", "ray")
    from loopwright.rollouts.engine_pool_ray import EnginePool, EngineWorker, SharedEngineLoops, build_loop_worker

    options = _ray_options(placement.request("engines"), scenario_dir, ray)
    engines = EnginePool(partial(EngineWorker, engine), name, **options)
    build = partial(build_loop_worker, loop, engines.client)
    workers = build_pool("loop", build, loop, scenario_dir, capacity=loop.concurrency, ray=ray)
    return SharedEngineLoops(engines, workers)


def build_remote_pool(
    config: RolloutConfig,
    loop: RemoteConfig,
    host: GatewayHost,
    scenario_dir: Path,
    *,
    run: str,
    run_id: str,
    ray: RayOptions | None = None,
) -> Pool:
    """The workers of a remote loop and their gateway: in this process, on Ray, or on a trial server."""
    # Read here, where the run was started: workers on other machines do not have these variables.
    passed_env = {name: os.environ[name] for name in loop.pass_env if name in os.environ}
    run_tests = "verifier" in config.judger.required_evidence()
    if loop.server is not None:
        from loopwright.rollouts.trial_server.client import TrialServerClient, TrialServerWorker

        token = server_token(loop.token_file, scenario_dir)
        client = TrialServerClient(loop.server, token, connections=2 * loop.concurrency)
        on_server = partial(
            TrialServerWorker, client, loop, run=run, run_id=run_id, passed_env=passed_env, run_tests=run_tests
        )
        return GatewayPool(host, LocalPool(on_server, name="loop"), client.check)
    build = partial(
        RemoteWorker,
        loop,
        run=run,
        passed_env=passed_env,
        run_tests=run_tests,
        sessions=None if loop.workers else host.local_sessions(),
    )
    workers = build_pool("loop", build, loop, scenario_dir, capacity=loop.concurrency, ray=ray)
    return GatewayPool(host, workers, _check_reachable if loop.workers else None)


async def _check_reachable(url: str) -> None:
    check_reachable(url)


@asynccontextmanager
async def _cluster(requests: Sequence[ResourceRequest], ray: RayOptions) -> AsyncIterator[None]:
    """Connect to Ray if a pool needs it, after checking that all pools fit together, before any is launched."""
    if not requests:
        yield
        return
    from loopwright.execution.ray.connection import RayConnection
    from loopwright.rollouts.pools.ray.launch import check_resources

    with RayConnection(address=ray.address, runtime_env=ray.runtime_env):
        # Whoever sets `wait_s` expects nodes that are started on demand.
        deadline = time.monotonic() + (ray.wait_s if "wait_s" in ray.model_fields_set else 0.0)
        while True:
            try:
                check_resources(requests)
                break
            except ResourcesError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_POLL_S)
        yield


def cluster_problems(requests: Sequence[ResourceRequest], ray: RayOptions) -> list[Problem]:
    """Why the pools of a run could not be placed on the cluster that is named; asked by `loopwright verify`."""
    from loopwright.execution.ray.connection import RayConnection
    from loopwright.rollouts.pools.ray.launch import check_resources

    try:
        with RayConnection(address=ray.address, runtime_env=ray.runtime_env):
            check_resources(requests)
    except ClusterError as error:
        return [Problem("[run.rollout]", str(error))]
    return []


def build_judger_client(config: JudgerConfig, scenario_dir: Path, ray: RayOptions | None = None) -> JudgerClient:
    """The client of a judger, in this process or on Ray."""
    build = partial(JudgeWorker.build, config)
    pool = build_pool("judger", build, config, scenario_dir, capacity=config.capacity(), ray=ray)
    return JudgerClient(pool, config)


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
    if find_spec("ray") is None:
        raise MissingExtra(f"{name} with workers = {config.workers}", "ray")
    from loopwright.rollouts.pools.ray.pool import RayPool

    options = _ray_options(config.request(name), scenario_dir, ray or RaySystem())
    there = partial(build_below, build, options["import_dir"])
    # Calls queue in the caller, where no deadline runs, and not in the pool.
    return RayPool(there, **options, max_concurrency=max(1000, capacity))


def _ray_options(request: ResourceRequest, scenario_dir: Path, ray: RayOptions) -> dict[str, Any]:
    """What pools on Ray have in common; nodes may have the scenario's directory elsewhere."""
    return {"request": request, "import_dir": ray.directory_on_nodes(scenario_dir), "wait_s": ray.wait_s}


def build_gateway_host(
    config: GatewayHostConfig,
    engine: EngineConfig,
    scenario_dir: Path,
    name: str,
    placement: PlacementConfig | None = None,
    ray: RayOptions | None = None,
) -> GatewayHost:
    """The host that a configuration describes; `placement` is that of the engines of a gateway on Ray."""
    if isinstance(config, TrialServerGatewayConfig):
        return TrialServerGatewayHost()
    if isinstance(config, ExternalGatewayConfig):
        return ExternalGatewayHost(GatewayAccess(config.url, config.token(scenario_dir), RESTART_S))
    if isinstance(config, EmbeddedGatewayConfig):
        return EmbeddedGatewayHost(config, lambda: engines.get(engine.type)(engine, scenario_dir))
    if find_spec("ray") is None:
        raise MissingExtra("a gateway on Ray", "ray")
    from loopwright.rollouts.engine_pool_ray import EnginePool, EngineWorker
    from loopwright.rollouts.remote.gateway_host_ray import RayGatewayHost

    ray, request = ray or RaySystem(), (placement or PlacementConfig(workers=1)).request("engines")
    pool = EnginePool(partial(EngineWorker, engine), name, **_ray_options(request, scenario_dir, ray))
    return RayGatewayHost(config, pool, **_ray_options(config.request("gateway"), scenario_dir, ray))
