"""Remote agents for verl: the agent loop `loopwright_remote` runs a scenario's loop and judger on verl's servers.

    # agents.yaml; actor_rollout_ref.rollout.agent: {agent_loop_config_path: agents.yaml,
    #                                                default_agent_loop: loopwright_remote}
    - name: loopwright_remote
      _target_: loopwright.integrations.verl.RemoteAgentLoop
      scenario: study.toml

Agents call a gateway in verl's worker process, or one elsewhere that this process serves as a relay worker; either
samples from verl's servers. Tested with verl 0.9.1 on a CPU, with a fake server instead of vLLM's or SGLang's; training
itself needs a GPU and was not tested.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "RemoteAgentLoop": "agent_loop",
    "VerlEngine": "engine",
    "VerlRollouts": "rollouts",
    "close": "agent_loop",
}


def __getattr__(name: str) -> Any:
    """Import verl only when its agent loop is used."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(name)
