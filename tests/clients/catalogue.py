"""The clients of the matrix: how each is started, what it must print or do, and what its user must set."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.policies import VERSE

ROOT = Path(__file__).parents[2]
PROGRAMS, REQUIREMENTS = Path(__file__).parent / "programs", Path(__file__).parent / "requirements"
SHOP = ("My name is Tilly.", VERSE, "That is 7 in all.", "You are welcome.")


@dataclass(frozen=True)
class Client:
    """One row of the matrix."""

    name: str
    package: str
    """Its package, whose pinned version is in `requirements/`."""
    environment: str
    """Its directory in `.venvs/`."""
    mode: str
    """What it uses: a dialect, and how."""
    command: tuple[str, ...]
    """Paths are relative to the environment; a program of ours is in `programs/`."""
    policy: str = "shop"
    prints: tuple[str, ...] = SHOP
    """What its program prints, one JSON text per line; empty for agents that edit `calc.py`."""
    env: Mapping[str, str] = field(default_factory=dict)
    branches: int = 1
    streams: bool = True
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What identifies its row."""
        return self.name, self.mode

    @property
    def id(self) -> str:
        return f"{self.name} {self.mode}".lower().replace(",", "").replace(" ", "-")

    @property
    def version(self) -> str:
        """The pinned version."""
        if self.environment == "node-clients":
            return str(json.loads((REQUIREMENTS / "package.json").read_text())["dependencies"][self.package])
        lines = (REQUIREMENTS / f"{self.environment.removeprefix('clients-')}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines)
        return next(version for name, version in pins.items() if name.partition("[")[0] == self.package)


def python(name: str, package: str, program: str, *modes: str, environment: str = "clients-sdks", **more) -> list[Client]:
    """A client for each mode of a Python program of ours."""
    start = ("bin/python", f"{{home}}/{program}.py")
    return [Client(name, package, environment, mode, (*start, mode), **more) for mode in modes]


def node(name: str, package: str, program: str, *modes: str, **more) -> list[Client]:
    """A client for each mode of a Node program of ours."""
    start = ("bin/node", f"{{work}}/{program}.mjs")
    return [Client(name, package, "node-clients", mode, (*start, mode), **more) for mode in modes]


LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TOTAL = ("That is 7 in all.",)
CLIENTS = [
    *python("OpenAI SDK for Python", "openai", "openai_sdk", "chat", "responses", "responses, stored"),
    *node("OpenAI SDK for Node", "openai", "openai_sdk", "chat", "responses", "responses, stored"),
    *python("Anthropic SDK for Python", "anthropic", "anthropic_sdk", "messages"),
    *python("Anthropic SDK for Python", "anthropic", "anthropic_sdk", "messages, tool_runner", prints=TOTAL),
    *node("Anthropic SDK for Node", "@anthropic-ai/sdk", "anthropic_sdk", "messages"),
    *node("Anthropic SDK for Node", "@anthropic-ai/sdk", "anthropic_sdk", "messages, toolRunner", prints=TOTAL),
    *node("Vercel AI SDK", "ai", "vercel", "chat", "responses", "messages"),
    *python("LiteLLM", "litellm", "litellm_sdk", "chat", "messages", "responses", environment="clients-litellm", env=LOCAL),
    *python(
        "LangGraph", "langgraph", "langgraph_app", "chat", "responses", "responses, use_previous_response_id"
    ),
    *python(
        "openai-agents", "openai-agents", "agents_app", "chat", "responses", "responses, auto_previous_response_id"
    ),
    *python(
        "pydantic-ai", "pydantic-ai-slim", "pydantic_ai_app", "chat", "responses",
        "responses, openai_previous_response_id", "messages",
    ),
    *python(
        "instructor", "instructor", "instructor_app", "chat, tools", "chat, JSON schema",
        environment="clients-instructor", policy="bill", prints=("tea and cake: 7",),
    ),
    *python("smolagents", "smolagents", "smolagents_app", "chat, CodeAgent", "chat, CodeAgent, streamed", policy="coder", prints=TOTAL),
    *python("smolagents", "smolagents", "smolagents_app", "chat, ToolCallingAgent", policy="answerer", prints=TOTAL),
    Client(
        "mini-swe-agent", "mini-swe-agent", "clients-litellm", "chat",
        ("bin/mini", "-m", "openai/policy", "-t", "fix add in calc.py", "-y", "--exit-immediately"),
        policy="mini", prints=(), streams=False, branches=2,
        env={**LOCAL, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    Client(
        "aider", "aider-chat", "clients-aider", "chat",
        ("bin/aider", "--model", "openai/policy", "--edit-format", "diff", "--message", "fix add", "--yes-always", "--no-git",
         "--analytics-disable", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "calc.py"),
        policy="aider", prints=(), env=LOCAL,
    ),
    Client(
        "Claude Code", "@anthropic-ai/claude-code", "node-clients", "messages",
        ("bin/node", "{work}/node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs", "-p", "fix add in calc.py", "--model", "policy", "--allowedTools", "Bash"),
        policy="claude", prints=(),
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1"},
    ),
    Client(
        "codex", "@openai/codex", "node-clients", "responses",
        ("bin/node", "{work}/node_modules/@openai/codex/bin/codex.js", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         "-m", "policy", "-c", "model_provider=lw", "-c", "model_providers.lw.name=lw", "-c", 'model_providers.lw.base_url="{base}/v1"', "-c", "model_providers.lw.env_key=OPENAI_API_KEY",
         "-c", "model_providers.lw.wire_api=responses", "-c", "analytics.enabled=false", "fix add in calc.py"),
        policy="codex", prints=(),
    ),
    *python(
        "terminus-2", "harbor", "terminus_app", "chat", "chat, rollout_details",
        environment="harbor", policy="terminus", prints=("reward 1.0",), streams=False,
        env={**LOCAL, "HARBOR_TELEMETRY": "0", "PYTHONPATH": f"{{home}}:{ROOT / 'src'}"},
    ),
]
