"""Builds a rollout environment: its pools of loop workers and judgers, in this process or on Ray."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import MissingExtra
from loopwright.engines.base import EngineConfig, engines
from loopwright.ledger.groups import Groups
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.env import PolicySource, RolloutEnv
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers import JudgerClient, JudgeWorker
from loopwright.rollouts.judgers.base import JudgerConfig
from loopwright.rollouts.loops.worker import LoopWorker
from loopwright.rollouts.pools.base import Pool, WorkerFactory
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.pools.resources import ResourceRequest
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

_NOT_FINGERPRINTED = {
    *("workers", "cpus", "memory", "concurrency", "timeout_s", "retries", "pause_s", "breaker", "cooldown_s"),
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
) -> RolloutEnv:
    """Build the environment of a rollout run."""
    loop = config.loop
    gateway = (gateway or EmbeddedGatewayConfig()) if isinstance(loop, RemoteConfig) else None
    in_process = not loop.workers if gateway is None else isinstance(gateway, EmbeddedGatewayConfig)
    return RolloutEnv(
        book,
        tasks=tasks,
        loop=_build_loop(book, config, engine, gateway, scenario_dir),
        judger=build_judger_client(config.judger, scenario_dir),
        buffer=Groups(book.ledger),
        produce=config.produce,
        seed=seed,
        concurrency=loop.concurrency,
        deadline_s=loop.total_s + (loop.queue_s if isinstance(loop, RemoteConfig) and loop.server else 0.0),
        source=PolicySource(
            engine, loop.sampling, scenario_dir, in_process=engine.type == "transformers" and in_process
        ),
        evaluation=evaluation,
        cluster=partial(
            _cluster, [*config.resource_requests(), *(gateway.resource_requests() if gateway is not None else ())]
        ),
    )


def _build_loop(
    book: TrialBook, config: RolloutConfig, engine: EngineConfig, gateway: GatewayHostConfig | None, scenario_dir: Path
) -> Pool:
    """The loop's workers, each with its own engine, or all with a gateway that has one."""
    loop = config.loop
    if isinstance(loop, RemoteConfig) and gateway is not None:
        # Read here, where the run was started: workers on other machines do not have these variables.
        passed_env = {name: os.environ[name] for name in loop.pass_env if name in os.environ}
        run_tests = "verifier" in config.judger.required_evidence()
        host = build_gateway_host(gateway, engine, scenario_dir, book.name)
        if loop.server is not None:
            return _trial_server_loop(
                loop, loop.server, host, book, scenario_dir, passed_env=passed_env, run_tests=run_tests
            )
        build: WorkerFactory = partial(
            RemoteWorker,
            loop,
            scenario_dir,
            run=book.name,
            passed_env=passed_env,
            run_tests=run_tests,
            sessions=None if loop.workers else host.local_sessions(),
        )
        workers = build_pool("loop", build, loop, scenario_dir, capacity=loop.concurrency)
        return GatewayPool(host, workers, _check_reachable if loop.workers else None)
    return build_pool(
        "loop", partial(LoopWorker.build, loop, engine, scenario_dir), loop, scenario_dir, capacity=loop.concurrency
    )


def _trial_server_loop(
    loop: RemoteConfig,
    url: str,
    host: GatewayHost,
    book: TrialBook,
    scenario_dir: Path,
    *,
    passed_env: Mapping[str, str],
    run_tests: bool,
) -> Pool:
    """A loop whose agents run on a trial server."""
    from loopwright.rollouts.trial_server.client import TrialServerClient, TrialServerWorker

    client = TrialServerClient(url, server_token(loop.token_file, scenario_dir), connections=2 * loop.concurrency)
    run_id = str(book.ledger.state("id"))  # the same after a resume, so that no trial runs twice
    build = partial(
        TrialServerWorker, client, loop, run=book.name, run_id=run_id, passed_env=passed_env, run_tests=run_tests
    )
    return GatewayPool(host, LocalPool(build, name="loop"), client.check)


async def _check_reachable(url: str) -> None:
    check_reachable(url)


@contextmanager
def _cluster(requests: Sequence[ResourceRequest]) -> Iterator[None]:
    """Connect to Ray if a pool needs it, after checking that all pools fit together, before any is launched."""
    if not requests:
        yield
        return
    from loopwright.execution.ray.connection import RayConnection
    from loopwright.rollouts.pools.ray.launch import check_resources

    with RayConnection():
        check_resources(requests, "PACK")
        yield


def build_judger_client(config: JudgerConfig, scenario_dir: Path) -> JudgerClient:
    """The client of a judger, in this process or on Ray."""
    build = partial(JudgeWorker.build, config, scenario_dir)
    return JudgerClient(build_pool("judger", build, config, scenario_dir, capacity=config.capacity()), config)


def build_pool(name: str, build: WorkerFactory, config: Any, scenario_dir: Path, *, capacity: int) -> Pool:
    """`workers = 0`: in this process; otherwise on Ray, with up to `capacity` calls per worker at a time."""
    if config.workers == 0:
        return LocalPool(build, name=name)
    try:
        from loopwright.rollouts.pools.ray.pool import RayPool
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{name} with workers = {config.workers}", "ray") from error
    return RayPool(
        build,
        workers=config.workers,
        cpus=config.cpus,
        memory_bytes=config.memory,
        name=name,
        import_dir=scenario_dir,
        # Calls queue in the caller, where no deadline runs, and not in the pool.
        max_concurrency=max(1000, capacity),
    )


def build_gateway_host(config: GatewayHostConfig, engine: EngineConfig, scenario_dir: Path, name: str) -> GatewayHost:
    """The host that a configuration describes."""
    if isinstance(config, TrialServerGatewayConfig):
        return TrialServerGatewayHost()
    if isinstance(config, ExternalGatewayConfig):
        return ExternalGatewayHost(GatewayAccess(config.url, config.token(scenario_dir), RESTART_S))
    if isinstance(config, EmbeddedGatewayConfig):
        return EmbeddedGatewayHost(config, lambda: engines.get(engine.type)(engine, scenario_dir))
    try:
        from loopwright.rollouts.remote.gateway_host_ray import RayGatewayHost
    except ModuleNotFoundError as error:
        raise MissingExtra("a gateway on Ray", "ray") from error
    return RayGatewayHost(config, engine, scenario_dir, name)
