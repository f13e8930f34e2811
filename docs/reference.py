"""Writes docs/reference.md, every key of a scenario, from the schema; `--check` says whether it is up to date."""

import re
import sys
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from loopwright.agents import agents, rollout_agents
from loopwright.core.config import Config, Size
from loopwright.core.registry import Registry
from loopwright.core.trial import Penalties, rewards
from loopwright.engines.base import Sampling, engines
from loopwright.envs.live.config import LiveConfig
from loopwright.envs.stopping import FidelityConfig, StopConfig
from loopwright.execution.system import systems
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers.base import judgers
from loopwright.rollouts.loops.base import loops
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.remote.config import BoundsConfig
from loopwright.rollouts.remote.gateway_config import GATEWAY_HOSTS
from loopwright.rollouts.tasks.sources import task_sources
from loopwright.scenario.schema import RunConfig, Scenario
from loopwright.spaces.parameter import Choice, Fixed, Range
from loopwright.spaces.space import EnvParamConfig
from loopwright.trainers.config import LoraConfig
from loopwright.workloads.base import workloads
from loopwright.workloads.command_config import (
    MetricConfig,
    ProgressConfig,
    ReadConfig,
    ReadyConfig,
    ServiceConfig,
    SuccessConfig,
)
from loopwright.workloads.steps import StepConfig

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# TOML reference

<!-- Written by docs/reference.py (`make docs`); do not edit. -->

A scenario is one TOML file. Unknown keys are errors. Paths are relative to the scenario's own directory, or to `home`.
"""


def main() -> int:
    """Write the page, or compare it."""
    page = "\n".join([HEAD, *sections()])
    if "--check" not in sys.argv:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() != page:
        print("docs/reference.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


def sections() -> list[str]:
    """One section per table of a scenario."""
    parts = [
        section("Scenario", Scenario),
        *kinds("`[system]`", systems),
        section("`[[run]]`", RunConfig),
        section("`[run.live]`", LiveConfig),
        section("`[run.rollout]`", RolloutConfig),
        section("`[run.rollout] produce`", ProduceConfig),
        section("`[run.rollout] loop`, `sampling`", Sampling),
        *(section(f'`[run.gateway]`, `type = "{name}"`', model) for name, model in GATEWAY_HOSTS.items()),
        section("`[run.rollout] loop`, `bounds`", BoundsConfig),
        section("`[run.eval]`", EvalConfig),
        section("`[run.agent] lora`", LoraConfig),
        section("`[[run]] stop`", StopConfig),
        section("`[run.fidelity] NAME`", FidelityConfig),
        section("`[[run]] pre`, `post`", StepConfig),
        section("`[run.rewards]`", Penalties),
        section("`[run.env_params.NAME]`", EnvParamConfig),
    ]
    for where, registry in (
        ("`[run.agent]`", agents),
        ("`[run.agent]` with `[run.rollout]`", rollout_agents),
        ("`[run.workload]`", workloads),
        ("`[[run]] reward`", rewards),
        ("`[run.engine]`", engines),
        ("`[run.rollout] tasks`", task_sources),
        ("`[run.rollout] loop`", loops),
        ("`[run.rollout] judger`", judgers),
    ):
        parts += kinds(where, registry)
    parts.append(section("`[run.workload] success`", SuccessConfig))
    parts.append(section("`[run.workload.metrics] NAME`", MetricConfig))
    parts.append(section("`[[run.workload.read]]`", ReadConfig))
    parts.append(section("`[run.workload] progress`", ProgressConfig))
    parts.append(section("`[run.workload.service]`", ServiceConfig))
    parts.append(section("`[run.workload.service] ready`", ReadyConfig))
    for form, model in (("a range", Range), ("a list", Choice), ("a fixed value", Fixed)):
        parts.append(section(f"`[run.workload.args] NAME` as {form}", model))
    return parts


def kinds(where: str, registry: Registry[Any]) -> list[str]:
    """One section per type of a table."""
    parts = []
    for name in registry.names():
        item, title = registry.get(name), f'{where}, `type = "{name}"`'
        parts.append(section(title, getattr(item, "Config", item)))
    return parts


def section(title: str, model: type[Config]) -> str:
    """A table of a model's keys."""
    lines = [
        f"## {title}",
        "",
        (model.__doc__ or "").strip().split("\n\n")[0],
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    docs = model.field_docs()
    for name, field in model.model_fields.items():
        if not field.repr:  # not for users to set
            continue
        cells = (
            f"`{field.alias or name}`",
            kind(field.annotation),
            default(field),
            " ".join(docs.get(name, "").split()),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def kind(annotation: Any) -> str:
    """A type in the terms of TOML."""
    if annotation == Size | None:
        annotation = int
    text = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    for old, new in (
        ("typing.", ""),
        ("collections.abc.", ""),
        ("NoneType", "None"),
        (" | None", ""),
        ("Literal", "one of "),
    ):
        text = text.replace(old, new)
    for old, new in (
        ("tuple", "list"),
        ("dict", "table"),
        ("Mapping", "table"),
        (", ...", ""),
        ("str", "string"),
        ("float", "number"),
        ("int", "integer"),
        ("bool", "boolean"),
    ):
        text = re.sub(rf"\b{old}\b" if old.isalpha() else re.escape(old), new, text)
    if "one of ['first']" in text:
        return '`"first"` or list of tables'
    words = text.replace("loopwright.", "").split(".")
    if any(word in text for word in ("Config", "RewardFunction", "Sampling")):
        return "list of tables" if text.startswith("list") else "table"
    return text if "one of" in text else words[-1]


def default(field: Any) -> str:
    """A default as TOML would write it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, Config) or value in ((), {}):
        return ""
    if value == sys.executable:  # differs from machine to machine
        return "this Python"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value!r}`".replace("'", '"')


if __name__ == "__main__":
    sys.exit(main())
