"""Run as a script in Harbor's interpreter: one of Harbor's agents, on one instruction, in the current directory.

The agent is already in a sandbox: its environment is the machine that it sees, and processes live as long as the agent.
"""

import asyncio
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}  # neither reaches anything from here
sys.path.append(str(Path(__file__).parent))  # Harbor's interpreter does not have Loopwright

from harbor.agents.factory import AgentFactory
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.paths import EnvironmentPaths, TrialPaths
from harbor_env import LocalEnvironment  # type: ignore[import-not-found]

_MODEL = "openai/policy"
_OWN_DEFAULTS = {"record_terminal_session": False}
"""Recordings need a program that is rarely installed, and the gateway records the conversation anyway."""


class CurrentEnvironment(LocalEnvironment):  # type: ignore[misc]
    """Runs commands here, in the sandbox that this process is in."""

    variables = os.environ  # the trial's marker among them, by which its processes are found and ended

    def _validate_definition(self) -> None: ...  # the sandbox is there already; an image need not have its programs

    async def start(self, force_build: bool) -> None:
        self.logger.debug(f"nothing to build (force_build={force_build})")

    def _enter(self) -> Iterator[str]:
        yield from ()


async def main(name: str, instruction: str) -> None:
    """Run the agent; whatever it raises ends this process."""
    logs = Path(tempfile.mkdtemp(prefix="harbor-"))
    EnvironmentPaths.agent_dir = PurePosixPath(logs)  # /logs may not be writable here
    os.environ["TMUX_TMPDIR"] = str(logs)  # a server of our own, also without a sandbox
    config = AgentConfig(name=name, model_name=_MODEL)
    parameters = inspect.signature(AgentFactory.get_agent_class_from_config(config).__init__).parameters
    options: dict[str, Any] = {**_OWN_DEFAULTS, "api_base": os.environ["OPENAI_BASE_URL"]}
    options = {key: value for key, value in options.items() if key in parameters}
    options |= json.loads(os.environ.get("LOOPWRIGHT_ARGS") or "{}")
    config = AgentConfig(name=name, model_name=options.pop("model_name", _MODEL), kwargs=options)
    trial = TrialPaths(logs)
    trial.mkdir()
    agent = AgentFactory.create_agent_from_config(config, logs_dir=trial.agent_dir)
    environment = CurrentEnvironment(
        environment_dir=logs,
        environment_name="task",
        session_id=os.environ.get("LOOPWRIGHT_SESSION") or "trial",
        trial_paths=trial,
        task_env_config=EnvironmentConfig(workdir=str(Path.cwd())),
    )
    await environment.start(force_build=False)
    try:
        await agent.setup(environment)
        await agent.run(instruction, environment, AgentContext())
    finally:
        await environment.stop(delete=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
