"""The rollouts of one of verl's worker processes: their gateway, agents and judger, and what a lost one counts as."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

import orjson

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.engines.base import Engine, EngineConfig, Sampling
from loopwright.integrations.branch import NoReward
from loopwright.integrations.verl.engine import VerlEngine
from loopwright.integrations.verl.relay_host import RelayGatewayHost
from loopwright.rollouts.build import build_judger_client, build_remote_pool
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, WorkerLost
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_config import (
    EXTERNAL_ENGINE,
    EmbeddedGatewayConfig,
    ExternalGatewayConfig,
    GatewayHostConfig,
)
from loopwright.rollouts.remote.gateway_host import RESTART_S, EmbeddedGatewayHost, GatewayAccess, GatewayHost
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.scenario.load import load
from loopwright.scenario.make import select_run
from loopwright.scenario.overrides import parse_assignments
from loopwright.scenario.schema import RunConfig

log = logging.getLogger(__name__)
_ATTEMPTS, _GRACE_S, _RECENT = 3, 10.0, 1000
_COLUMNS = ("instance_id", "local_task_path", "task_hash", "data_source", "id")
"""The columns of verl's dataset that a task keeps, besides `extra_info`."""


class RewardParts(dict[str, float]):
    """The parts of a reward; those that a rollout does not have are NaN, because verl expects the same in all rows."""

    def __missing__(self, name: str) -> float:
        return nan


@dataclass(frozen=True, slots=True)
class JudgedRollout:
    """A rollout with the reward that verl gets."""

    episode: Episode
    reward: float
    parts: RewardParts
    failure: str = ""
    """Why it is lost; it then has the reward of others."""


@dataclass
class _Siblings:
    """The rollouts of one prompt that this process runs."""

    open: int = 0
    rewards: list[tuple[float, RewardParts]] = field(default_factory=list)
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)


class VerlRollouts:
    """What all rollouts of one worker process share: the gateway, the agents' worker, the judger."""

    def __init__(self, config: RunConfig, scenario_dir: Path, servers: Any, tokenizer: Any) -> None:
        rollout, engine = config.rollout, config.engine or EXTERNAL_ENGINE
        if rollout is None or not isinstance(rollout.loop, RemoteConfig):
            raise ValueError(f'run {config.name!r} has no loop = {{ type = "remote", ... }}')
        if rollout.loop.workers:
            raise ValueError("`workers` of the loop must be 0 here: verl has its own workers (rollout.agent)")
        for name, own in rollout.settings().items():
            if own.loop != rollout.loop or own.judger != rollout.judger or own.sampling is not None:
                raise ValueError(f"tasks, {name}: own loops, judgers and sampling do not work here; verl has the tasks")
        self.config = rollout.loop
        settings = engine.model_dump(include=set(EngineConfig.model_fields) - {"type"})
        engine_config = EngineConfig(type="verl", **settings)

        def build_engine() -> VerlEngine:
            return VerlEngine(servers, tokenizer, engine_config)

        host = _host(config.gateway or EmbeddedGatewayConfig(), build_engine, scenario_dir)
        tested = [rollout.loop] if "verifier" in rollout.judger.required_evidence() else []
        run_id = f"verl-{uuid4().hex}"
        self._pool = build_remote_pool(
            {"": rollout.loop}, host, scenario_dir, tested=tested, run=config.name, run_id=run_id
        )
        self._judger = build_judger_client(rollout.judger, scenario_dir)
        self._slots = asyncio.Semaphore(self.config.concurrency)
        queue_s = self.config.queue_s if self.config.server else 0.0
        self._timeout_s = self.config.total_s + queue_s + _GRACE_S
        self._starting: asyncio.Task[None] | None = None
        self._groups: dict[str, _Siblings] = {}
        self._recent: deque[tuple[float, RewardParts]] = deque(maxlen=_RECENT)

    async def start(self) -> None:
        """Start the gateway, the agents' worker and the judger, once."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._judger.start()
        try:
            if self._judger.compares:
                raise ValueError("a judger that compares rollouts cannot be used here: verl runs them separately")
            await self._pool.start()
        except BaseException:
            await self._judger.close()
            raise

    async def roll_in_group(self, task: Task, sampling: Sampling, *, group: str) -> JudgedRollout:
        """A rollout with a reward. One that is lost has no tokens, and the mean reward of its siblings.

        verl cannot represent a rollout without a reward, and a zero would be a failure that the policy did not cause;
        the mean leaves the baseline of its group where it is. Siblings are the rollouts of the same group that this
        process has started, which verl does at once for a whole batch.
        """
        siblings = self._groups.setdefault(group, _Siblings())
        siblings.open += 1
        episode, failure = Episode(task), ""
        try:
            await self.start()
            episode = await self.roll(task, sampling)
        except NoReward as error:
            log.warning("%s; it is masked", error)
            failure = str(error)
        finally:
            if episode.reward is not None:
                siblings.rewards.append((episode.reward.value, RewardParts(episode.rewards)))
                self._recent.append(siblings.rewards[-1])
            siblings.open -= 1
            if not siblings.open:
                siblings.all_ended.set()
                self._groups.pop(group, None)
        if episode.reward is not None:
            return JudgedRollout(episode, episode.reward.value, RewardParts(episode.rewards))
        await siblings.all_ended.wait()
        rewards = siblings.rewards or list(self._recent) or [(0.0, RewardParts())]
        return JudgedRollout(episode, fmean(reward for reward, _ in rewards), RewardParts(rewards[-1][1]), failure)

    async def roll(self, task: Task, sampling: Sampling) -> Episode:
        """A judged episode. Faults of others than the policy are retried; NoReward if they persist."""
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                async with self._slots:
                    request = RolloutRequest(task, uuid4().hex, sampling)
                    episode: Episode = await self._pool.call(request, timeout_s=self._timeout_s)
            except PoolDown:
                raise
            except (WorkerLost, TimeoutError) as error:
                reason = describe_error(error)
                continue
            if episode.fault not in (None, Fault.POLICY):
                reason = episode.reason
                continue
            try:
                return episode.judged(await self._judger.judge(episode))
            except JudgeFailed as error:
                reason = str(error)
        raise NoReward(f"the rollout of task {task.id!r} has no reward after {_ATTEMPTS} attempts: {reason}")

    async def close(self) -> None:
        """Release all resources."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        try:
            await self._pool.close()
        finally:
            await self._judger.close()


def load_run(
    scenario: str, name: str | None, overrides: Sequence[str] | Mapping[str, Any], env: Mapping[str, Any]
) -> tuple[LoadedScenario, RunConfig]:
    """The scenario and its run, with the overrides of `--set` and these variables in the environment."""
    os.environ.update({key: str(value) for key, value in env.items()})
    flat = dict(_flatten(overrides)) if isinstance(overrides, Mapping) else parse_assignments(overrides)
    loaded = load(Path(scenario), set=flat)
    return loaded, select_run(loaded, name)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a row of verl's dataset."""
    facts = dict(row.get("extra_info") or {}) | {name: row[name] for name in _COLUMNS if row.get(name) is not None}
    label = (row.get("reward_model") or {}).get("ground_truth")
    plain = {**facts, "prompt": [dict(message) for message in row["raw_prompt"]], "label": label}
    plain = orjson.loads(orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY))
    return Task.of(plain, id=str(facts.get("instance_id", row.get("index", facts.get("index", "")))))


def _host(config: GatewayHostConfig, build_engine: Callable[[], Engine], scenario_dir: Path) -> GatewayHost:
    if isinstance(config, EmbeddedGatewayConfig):
        return EmbeddedGatewayHost(config, build_engine)
    if isinstance(config, ExternalGatewayConfig):
        return RelayGatewayHost(GatewayAccess(config.url, config.token(scenario_dir), RESTART_S), build_engine)
    raise ValueError(
        f'[run.gateway] type = "{config.type}" has other engines, but verl\'s servers must sample here. Use '
        '"embedded", or "external" with a gateway that was started with --relay.'
    )
