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


def python(
    name: str, package: str, program: str, *modes: str, environment: str = "clients-sdks", **more
) -> list[Client]:
    """A client for each mode of a Python program of ours."""
    start = ("bin/python", f"{{home}}/{program}.py")
    return [Client(name, package, environment, mode, (*start, mode), **more) for mode in modes]


def node(name: str, package: str, program: str, *modes: str, **more) -> list[Client]:
    """A client for each mode of a Node program of ours."""
    start = ("bin/node", f"{{work}}/{program}.mjs")
    return [Client(name, package, "node-clients", mode, (*start, mode), **more) for mode in modes]


LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
QUIET = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER"), "1")
TOTAL = ("That is 7 in all.",)
AIDER = ("--yes-always", "--no-git", "--analytics-disable", "--no-check-update", "--no-show-release-notes")
CODEX = {
    "model_provider": "local",
    "model_providers.local": '{{name="local", base_url="{base}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}',
    "analytics.enabled": "false",
}
CLAUDE = ("bin/node", "{work}/node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs", "--model", "policy")
REWRITES = "It sends its own turns back in other words, so each step is a branch"

CLIENTS = [
    *python("OpenAI SDK for Python", "openai", "openai_sdk", "chat", "responses", "responses, stored"),
    *node("OpenAI SDK for Node", "openai", "openai_sdk", "chat", "responses", "responses, stored"),
    *python("Anthropic SDK for Python", "anthropic", "anthropic_sdk", "messages"),
    *python(
        *("Anthropic SDK for Python", "anthropic", "anthropic_sdk", "messages, tool_runner"),
        prints=TOTAL,
        streams=False,
    ),
    *node("Anthropic SDK for Node", "@anthropic-ai/sdk", "anthropic_sdk", "messages"),
    *node(
        *("Anthropic SDK for Node", "@anthropic-ai/sdk", "anthropic_sdk", "messages, toolRunner"),
        prints=TOTAL,
        streams=False,
    ),
    *node("Vercel AI SDK", "ai", "vercel", "chat", "responses"),
    *node("Vercel AI SDK", "ai", "vercel", "messages", note="Its `baseURL` for Anthropic ends in `/v1`"),
    *python("LiteLLM", "litellm", "litellm_sdk", "chat", "messages", environment="clients-litellm", env=LOCAL),
    *python(
        *("LiteLLM", "litellm", "litellm_sdk", "responses"),
        environment="clients-litellm",
        env=LOCAL,
        note="As `openai/responses/NAME`, with a name that LiteLLM knows: it does not stream others, and repeats the "
        "arguments of their tool calls",
    ),
    *python("LangGraph", "langgraph", "langgraph_app", "chat", "responses", "responses, use_previous_response_id"),
    *python(
        *("openai-agents", "openai-agents", "agents_app"),
        *("chat", "responses", "responses, auto_previous_response_id"),
        note="`set_tracing_disabled(True)`, or it sends traces to OpenAI",
    ),
    *python(
        *("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_app"),
        *("chat", "responses", "responses, openai_previous_response_id", "messages"),
    ),
    *python(
        *("instructor", "instructor", "instructor_app", "chat, tools", "chat, JSON schema"),
        environment="clients-instructor",
        policy="bill",
        prints=("tea and cake: 7",),
        streams=False,
    ),
    *python(
        *("smolagents", "smolagents", "smolagents_app", "chat, CodeAgent"),
        policy="coder",
        prints=TOTAL,
        streams=False,
    ),
    *python(*("smolagents", "smolagents", "smolagents_app", "chat, CodeAgent, streamed"), policy="coder", prints=TOTAL),
    *python(
        *("smolagents", "smolagents", "smolagents_app", "chat, ToolCallingAgent"),
        policy="answerer",
        prints=TOTAL,
        streams=False,
        branches=2,
        note=REWRITES,
    ),
    Client(
        *("mini-swe-agent", "mini-swe-agent", "clients-litellm", "chat"),
        ("bin/mini", "-m", "openai/policy", "-t", "fix add in calc.py", "-y", "--exit-immediately"),
        policy="mini",
        prints=(),
        streams=False,
        branches=2,
        env={**LOCAL, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        note="`MSWEA_CONFIGURED=true`, `MSWEA_COST_TRACKING=ignore_errors`. It drops an answer without a tool call, "
        "which is a branch",
    ),
    Client(
        *("aider", "aider-chat", "clients-aider", "chat"),
        ("bin/aider", "--model", "openai/policy", "--edit-format", "diff", "--message", "fix add", *AIDER, "calc.py"),
        policy="aider",
        prints=(),
        env=LOCAL,
        note="`--model openai/NAME`; unattended: `--yes-always`, `--analytics-disable`",
    ),
    Client(
        *("Claude Code", "@anthropic-ai/claude-code", "node-clients", "messages"),
        (*CLAUDE, "--allowedTools", "Bash", "-p", "fix add in calc.py"),
        policy="claude",
        prints=(),
        env=QUIET,
        note="`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`",
    ),
    Client(
        *("Claude Code", "@anthropic-ai/claude-code", "node-clients", "messages, two sub-agents"),
        (*CLAUDE, "--allowedTools", "Bash,Agent,Task", "-p", "fix add in calc.py, with a fixer and a reader"),
        policy="team",
        prints=(),
        env=QUIET,
        branches=3,
        note="Each sub-agent is a branch",
    ),
    Client(
        *("codex", "@openai/codex", "node-clients", "responses"),
        (
            *("bin/node", "{work}/node_modules/@openai/codex/bin/codex.js", "exec", "-m", "policy"),
            *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *(word for name, value in CODEX.items() for word in ("-c", f"{name}={value}")),
            "fix add in calc.py",
        ),
        policy="codex",
        prints=(),
        note='A `[model_providers.NAME]` with `base_url`, `env_key` and `wire_api = "responses"` in its config.toml',
    ),
    *python(
        *("Harbor terminus-2", "harbor", "terminus_app", "chat", "chat, rollout_details"),
        environment="harbor",
        policy="terminus",
        prints=("reward 1.0",),
        streams=False,
        env={**LOCAL, "HARBOR_TELEMETRY": "0", "PYTHONPATH": f"{{home}}:{ROOT / 'src'}"},
        note="`--model openai/NAME --ak api_base=URL`; processes must survive a command, since it types into tmux",
    ),
]
