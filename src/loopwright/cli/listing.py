"""`loopwright list`: the types that a scenario can name, ours and those of installed packages."""

from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.agents import agents, rollout_agents
from loopwright.core.registry import Registry
from loopwright.core.trial import rewards
from loopwright.engines.base import engines
from loopwright.rollouts.judgers.base import judgers
from loopwright.rollouts.loops.base import loops
from loopwright.rollouts.tasks.sources import task_sources
from loopwright.workloads.base import workloads


class Family(StrEnum):
    """What can be listed."""

    AGENTS = "agents"
    WORKLOADS = "workloads"
    REWARDS = "rewards"
    TASKS = "tasks"
    LOOPS = "loops"
    JUDGERS = "judgers"
    ENGINES = "engines"


_REGISTRIES: dict[Family, tuple[Registry[Any], ...]] = {
    Family.AGENTS: (agents, rollout_agents),
    Family.WORKLOADS: (workloads,),
    Family.REWARDS: (rewards,),
    Family.TASKS: (task_sources,),
    Family.LOOPS: (loops,),
    Family.JUDGERS: (judgers,),
    Family.ENGINES: (engines,),
}


def command(family: Annotated[Family, typer.Argument(metavar="WHAT", help=f"One of {', '.join(Family)}.")]) -> None:
    """List what a scenario can name: agents, workloads, rewards; task sources, agent loops, judgers and engines."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for registry in _REGISTRIES[family]:
        for name in registry.names():
            try:
                item = registry.get(name)
            except ImportError as error:
                table.add_row(name, escape(f"(cannot be imported: {error})"))
                continue
            notes = "  (takes env_params)" if getattr(item, "samples_env_params", False) else ""
            notes += "  (with [run.rollout])" if registry is rollout_agents else ""
            # The first docstring line of its config or else of the class, not one that the base has.
            base, config = registry.base, getattr(item, "Config", item)
            docs = [cls.__doc__ for cls in (config, item) if cls not in (base, getattr(base, "Config", base))]
            summary = next((doc.strip().split("\n")[0] for doc in docs if doc), "")
            table.add_row(name, escape(summary + notes))
    Console(highlight=False).print(table)
