"""Remote agents for verl: the agent loop `loopwright_remote` runs a scenario's loop and judger on verl's servers.

    # agents.yaml; actor_rollout_ref.rollout.agent: {agent_loop_config_path: agents.yaml,
    #                                                default_agent_loop: loopwright_remote}
    - name: loopwright_remote
      _target_: loopwright.integrations.verl.RemoteAgentLoop
      scenario: study.toml

Agents call a gateway in verl's worker process, which samples from verl's servers. The run's `[run.engine]` only sets
how conversations are written (`template`, `reasoning`). verl cannot represent a rollout without a reward: after three
attempts it is an error. Tested with verl 0.9.1 on a CPU, with a fake server instead of vLLM's or SGLang's; training
itself needs a GPU and was not tested.
"""

import asyncio
import copy
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4
from weakref import WeakKeyDictionary

import orjson
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.engines.base import Chunk, Engine, EngineConfig, EngineError, Finish, Sampling
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.named_tokenizer import stop_ids
from loopwright.engines.tokenizer import HubTokenizer
from loopwright.integrations.branch import Branches, NoReward, one_row
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.judgers import JudgerClient
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import Pool, PoolDown, WorkerLost
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_config import EmbeddedGatewayConfig
from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from loopwright.rollouts.remote.worker import RemoteWorker
from loopwright.scenario.load import load
from loopwright.scenario.make import select_run
from loopwright.scenario.schema import RunConfig

SCENARIO = "LOOPWRIGHT_SCENARIO"
"""The environment variable that names the scenario if the agent loop's config does not."""
_ATTEMPTS, _GRACE_S = 3, 10.0
_COLUMNS = ("instance_id", "local_task_path", "task_hash", "data_source", "id")
"""The columns of verl's dataset that a task keeps, besides `extra_info`."""


class VerlEngine(Engine):
    """verl's servers as an engine: a turn is one call. verl itself pauses them and updates their weights."""

    def __init__(self, servers: Any, tokenizer: Any, config: EngineConfig) -> None:
        super().__init__(config, Path())
        self._servers, self._session = servers, uuid4().hex
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        source = None if template is None else ChatTemplateSource(template, tokens=tokenizer.special_tokens_map)
        self.tokenizer = HubTokenizer.from_text(tokenizer.backend_tokenizer.to_str(), source)
        self._stops = stop_ids(self.tokenizer, tokenizer.eos_token_id)

    def for_session(self, key: str) -> Self:
        """A copy with its own request id, by which verl routes all turns of a session to one server."""
        view = copy.copy(self)
        view._session = f"{key}-{uuid4().hex}"
        return view

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(self._stops),
            "logprobs": True,
        }
        try:
            answer = await self._servers.generate(self._session, prompt_ids=list(ids), sampling_params=params)
        except Exception as error:  # whatever Ray or a server raises
            raise EngineError(f"verl's servers failed: {type(error).__name__}: {error}") from error
        tokens, logprobs = tuple(answer.token_ids), tuple(answer.log_probs or ())
        if len(tokens) != len(logprobs):
            raise EngineError(f"verl's servers sent {len(logprobs)} logprobs for {len(tokens)} tokens")
        version = int(answer.extra_fields.get("global_steps") or 0)
        finish: Finish = "stop" if tokens and tokens[-1] in self._stops else "length"
        if answer.stop_reason in ("aborted", "abort"):
            finish = "abort"
        yield Chunk(tokens, logprobs, version, finish)


class VerlRollouts:
    """What all rollouts of one worker process share: the gateway, the agents' worker, the judger."""

    def __init__(self, config: RunConfig, scenario_dir: Path, servers: Any, tokenizer: Any) -> None:
        rollout, engine = config.rollout, config.engine
        if rollout is None or engine is None or not isinstance(rollout.loop, RemoteConfig):
            raise ValueError(f'run {config.name!r} has no loop = {{ type = "remote", ... }}')
        gateway = config.gateway or EmbeddedGatewayConfig()
        if not isinstance(gateway, EmbeddedGatewayConfig):
            raise ValueError("[run.gateway] must be \"embedded\" here: its engine is verl's, in verl's worker process")
        if rollout.loop.workers:
            raise ValueError("`workers` of the loop must be 0 here: verl has its own workers (rollout.agent)")
        self.config = rollout.loop
        passed_env = {name: os.environ[name] for name in self.config.pass_env if name in os.environ}
        run_tests = "verifier" in rollout.judger.required_evidence()
        engine_config = EngineConfig(type="verl", template=engine.template, reasoning=engine.reasoning)
        host = EmbeddedGatewayHost(gateway, lambda: VerlEngine(servers, tokenizer, engine_config))
        build = partial(
            RemoteWorker,
            self.config,
            scenario_dir,
            run=config.name,
            passed_env=passed_env,
            run_tests=run_tests,
            sessions=host.local_sessions(),
        )
        self._pool: Pool = GatewayPool(host, LocalPool(build))
        self._judger: JudgerClient = build_judger_client(rollout.judger, scenario_dir)
        self._slots = asyncio.Semaphore(self.config.concurrency)

    async def start(self) -> Self:
        """Start the gateway, the agents' worker and the judger."""
        await self._judger.start()
        if self._judger.compares:
            await self._judger.close()
            raise ValueError("a judger that compares rollouts cannot be used here: verl runs them separately")
        await self._pool.start()
        return self

    async def roll(self, task: Task, sampling: Sampling) -> Episode:
        """A judged episode. Faults of others than the policy are retried; NoReward if they persist."""
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                async with self._slots:
                    request = RolloutRequest(task, uuid4().hex, sampling)
                    episode: Episode = await self._pool.call(request, timeout_s=self.config.total_s + _GRACE_S)
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
        try:
            await self._pool.close()
        finally:
            await self._judger.close()


_Key = tuple[str, str | None, int]
_shared_rollouts: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[VerlRollouts]]]" = (
    WeakKeyDictionary()
)
"""verl creates an agent loop per rollout; what they share is created once per event loop."""


async def close() -> None:
    """Close what the rollouts of this event loop share. Agents also end with the process."""
    for starting in _shared_rollouts.pop(asyncio.get_running_loop(), {}).values():
        await (await starting).close()


@register("loopwright_remote")
class RemoteAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs a remote agent for one row of verl's dataset.

    verl accepts one branch per rollout. With several, `branches = "refuse"` raises an error, and "main" uses the one
    with the most sampled tokens. `extra_fields["left_out"]` counts the tokens of the others, and those beyond
    `response_length`.
    """

    def __init__(
        self, *args: Any, scenario: str | None = None, name: str | None = None, branches: Branches = "refuse", **kw: Any
    ) -> None:
        super().__init__(*args, **kw)
        self._scenario, self._name, self._branches = scenario or os.environ.get(SCENARIO), name, branches

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One rollout; called by verl."""
        rollouts = await self._rollouts()
        update = {
            "temperature": float(sampling_params.get("temperature", 1.0)),
            "top_p": float(sampling_params.get("top_p", 1.0)),
            "top_k": max(0, int(sampling_params.get("top_k", -1))),
        }
        episode = await rollouts.roll(_task(row), rollouts.config.sampling.model_copy(update=update))
        return self._output(episode)

    async def _rollouts(self) -> VerlRollouts:
        if not self._scenario:
            raise ValueError(f"no scenario: set `scenario: study.toml` in verl's agent loop config, or {SCENARIO}")
        loop = asyncio.get_running_loop()
        shared, key = _shared_rollouts.setdefault(loop, {}), (self._scenario, self._name, id(self.server_manager))
        if key not in shared:
            loaded = load(Path(self._scenario))
            run = select_run(loaded, self._name)
            rollouts = VerlRollouts(run, loaded.directory, self.server_manager, self.tokenizer)
            shared[key] = loop.create_task(rollouts.start())
        return await asyncio.shield(shared[key])

    def _output(self, episode: Episode) -> AgentLoopOutput:
        row, left_out = one_row(episode, self._branches)
        if row is None:  # the agent never called the policy: use a masked token
            fields = _masked_fields(episode, self.tokenizer.eos_token_id)
        else:
            fields = episode.as_verl()[episode.rows().index(row)]
        max_prompt, max_response = self.rollout_config.prompt_length, self.rollout_config.response_length
        if len(fields["prompt_ids"]) > max_prompt:
            raise ValueError(
                f"the prompt of task {episode.task.id!r} has {len(fields['prompt_ids'])} tokens; truncated "
                f"to rollout.prompt_length = {max_prompt}, it would not match its answer. Raise prompt_length."
            )
        left_out += sum(fields["response_mask"][max_response:])
        for name in ("response_ids", "response_mask", "response_logprobs"):
            fields[name] = fields[name][:max_response]
        versions = fields["extra_fields"]["versions"][:max_response]
        steps = [version for version in versions if version >= 0]
        more = {
            "versions": versions,
            "left_out": left_out,
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
        }
        return AgentLoopOutput(**{**fields, "extra_fields": {**fields["extra_fields"], **more}})


def _masked_fields(episode: Episode, token: int) -> dict[str, Any]:
    return {
        "prompt_ids": [token],
        "response_ids": [token],
        "response_mask": [0],
        "response_logprobs": [0.0],
        "reward_score": None if episode.reward is None else episode.reward.value,
        "metrics": {},
        "extra_fields": {"versions": [-1], "reward_extra_info": dict(episode.rewards), "trainable": False},
    }


def _task(row: Mapping[str, Any]) -> Task:
    """The task of a row of verl's dataset."""
    facts = dict(row.get("extra_info") or {}) | {name: row[name] for name in _COLUMNS if row.get(name) is not None}
    label = (row.get("reward_model") or {}).get("ground_truth")
    plain = {**facts, "prompt": [dict(message) for message in row["raw_prompt"]], "label": label}
    plain = orjson.loads(orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY))
    return Task.of(plain, id=str(facts.get("instance_id", row.get("index", facts.get("index", "")))))
