"""The agent loop that verl instantiates for each row of its dataset."""

import asyncio
import logging
import os
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    _agent_loop_registry,
    register,
)

from loopwright.core.errors import did_you_mean
from loopwright.integrations.branch import Branches, one_row
from loopwright.integrations.verl.rollouts import JudgedRollout, VerlRollouts, load_run, task_of

log = logging.getLogger(__name__)
NAME = "loopwright_remote"
SCENARIO = "LOOPWRIGHT_SCENARIO"
"""The environment variable that names the scenario if the agent loop's config does not."""
_SECTION = "loopwright"
"""The section of verl's own config that overrides the settings in agents.yaml."""
_SETTINGS = ("scenario", "run", "set", "env", "branches")
_shared_rollouts: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], VerlRollouts]]" = (
    WeakKeyDictionary()
)
"""verl creates an agent loop per rollout; what they share is created once per event loop."""


async def close() -> None:
    """Close what the rollouts of this event loop share. Agents also end with the process."""
    for rollouts in _shared_rollouts.pop(asyncio.get_running_loop(), {}).values():
        await rollouts.close()


class RemoteAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs a remote agent for one row of verl's dataset.

    Settings are those of agents.yaml, overridden by the section `loopwright` of verl's config:

    - `scenario`, and `run` if it has several;
    - `set`: what `loopwright run --set` would be given, as `{loop.deadline_s: 60}` or `["loop.deadline_s=60"]`;
    - `env`: variables for the worker's environment, such as REMOTE_SERVER_TOKEN;
    - `branches`: verl accepts one branch per rollout. A rollout with several is masked (`mask`), represented by the one
      with the most sampled tokens (`main`), or an error (`refuse`).

    `extra_fields["left_out"]` counts the sampled tokens that are not trained on because of this or beyond
    `response_length`; `extra_fields["lost"]` says why a rollout is lost.
    """

    def __init__(self, *args: Any, name: str = "", **options: Any) -> None:
        settings = {key: options.pop(key) for key in _SETTINGS if key in options}
        super().__init__(*args, **options)
        section = OmegaConf.create(settings)
        if (own := OmegaConf.select(self.config, _SECTION)) is not None:
            section = OmegaConf.merge(section, own)
        self._settings: Any = OmegaConf.to_container(section, resolve=True)
        if unknown := sorted(self._settings.keys() - {*_SETTINGS}):
            raise ValueError(f"{_SECTION}.{unknown[0]} is unknown. {did_you_mean(unknown[0], _SETTINGS)}")
        self._branches: Branches = self._settings.get("branches", "mask")

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One rollout; called by verl."""
        rollouts, task = self._rollouts(), task_of(row)
        update = {
            "temperature": float(sampling_params.get("temperature", 1.0)),
            "top_p": float(sampling_params.get("top_p", 1.0)),
            "top_k": max(0, int(sampling_params.get("top_k", -1))),
        }
        sampling = rollouts.config.sampling.model_copy(update=update)
        judged = await rollouts.roll_in_group(task, sampling, group=str(row.get("uid", uuid4().hex)))
        return self._output(judged)

    def _rollouts(self) -> VerlRollouts:
        if not (scenario := self._settings.get("scenario") or os.environ.get(SCENARIO)):
            raise ValueError(f"no scenario: set `scenario: study.toml` in verl's agent loop config, or {SCENARIO}")
        shared = _shared_rollouts.setdefault(asyncio.get_running_loop(), {})
        key = (repr(self._settings), id(self.server_manager))
        if key not in shared:
            overrides, env = self._settings.get("set") or {}, self._settings.get("env") or {}
            loaded, run = load_run(scenario, self._settings.get("run"), overrides, env)
            shared[key] = VerlRollouts(run, loaded.directory, self.server_manager, self.tokenizer)
        return shared[key]

    def _output(self, judged: JudgedRollout) -> AgentLoopOutput:
        episode = judged.episode
        row, left_out = one_row(episode, self._branches)
        rows = episode.rows()
        fields = _masked_fields(self.tokenizer.eos_token_id) if row is None else episode.as_verl()[rows.index(row)]
        max_prompt, max_response = self.rollout_config.prompt_length, self.rollout_config.response_length
        if len(fields["prompt_ids"]) > max_prompt:
            log.warning(
                "the prompt of task %r has %d tokens; truncated to rollout.prompt_length = %d, it would not match its "
                "answer, so the rollout is masked. Raise prompt_length.",
                *(episode.task.id, len(fields["prompt_ids"]), max_prompt),
            )
            left_out += sum(fields["response_mask"])
            fields = _masked_fields(self.tokenizer.eos_token_id)
        left_out += sum(fields["response_mask"][max_response:])
        for name in ("response_ids", "response_mask", "response_logprobs"):
            fields[name] = fields[name][:max_response]
        versions = fields["extra_fields"]["versions"][:max_response]
        steps = [version for version in versions if version >= 0]
        more = {
            "versions": versions,
            "left_out": left_out,
            "lost": judged.failure,
            "reward_extra_info": judged.parts,
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
        }
        fields |= {"reward_score": judged.reward, "extra_fields": {**fields["extra_fields"], **more}}
        return AgentLoopOutput(**fields)


if NAME not in _agent_loop_registry:  # verl imports this file after it has read agents.yaml, which must stay in force
    register(NAME)(RemoteAgentLoop)


def _masked_fields(token: int) -> dict[str, Any]:
    """A rollout that is not trained on: verl needs a token in each."""
    return {
        "prompt_ids": [token],
        "response_ids": [token],
        "response_mask": [0],
        "response_logprobs": [0.0],
        "metrics": {},
        "extra_fields": {"versions": [-1], "trainable": False},
    }
