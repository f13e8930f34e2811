"""`loopwright list`: what can be named in a scenario, ours and that of installed packages."""

from enum import StrEnum
from typing import Annotated, Any

import typer

NAME = "list"


class Family(StrEnum):
    """What can be listed."""

    AGENTS = "agents"
    WORKLOADS = "workloads"
    REWARDS = "rewards"
    TASKS = "tasks"
    LOOPS = "loops"
    JUDGERS = "judgers"
    ENGINES = "engines"


def command(family: Annotated[Family, typer.Argument(help="What to list.")]) -> None:
    """List what a scenario can name: agents, workloads, rewards; task sources, agent loops, judgers and engines."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from loopwright.agents import agents, rollout_agents
    from loopwright.core.registry import Registry
    from loopwright.core.reward import rewards
    from loopwright.engines.base import engines
    from loopwright.rollouts.judgers.base import judgers
    from loopwright.rollouts.loops.base import loops
    from loopwright.rollouts.tasks.sources import task_sources
    from loopwright.workloads.base import workloads

    registries: dict[Family, Registry[Any]] = {
        Family.AGENTS: agents,
        Family.WORKLOADS: workloads,
        Family.REWARDS: rewards,
        Family.TASKS: task_sources,
        Family.LOOPS: loops,
        Family.JUDGERS: judgers,
        Family.ENGINES: engines,
    }
    registry = registries[family]
    table = Table(box=None, padding=(0, 2), show_header=False)
    for one in (agents, rollout_agents) if registry is agents else (registry,):
        for name in one.names():
            try:
                item = one.get(name)
            except ImportError as error:
                table.add_row(name, escape(f"(cannot be imported: {error})"))
                continue
            draws = "  (takes env_params)" if getattr(item, "samples_env_params", False) else ""
            where = "  (with [run.rollout])" if one is rollout_agents else ""
            table.add_row(name, escape(_said_of(item, one.base) + draws + where))
    Console(highlight=False).print(table)


def _said_of(item: Any, base: Any) -> str:
    """The first line of what its config says of itself, or else of what it says; not what their bases say."""
    config = getattr(item, "Config", item)
    own = [kind.__doc__ for kind in (config, item) if kind not in (base, getattr(base, "Config", base))]
    return next((doc.strip().split("\n")[0] for doc in own if doc), "")
