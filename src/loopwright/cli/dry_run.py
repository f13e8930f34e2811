"""`loopwright dry-run`: show what a scenario would do, and do nothing."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.cli.options import Overrides, ScenarioFile, overrides_of

if TYPE_CHECKING:
    from loopwright.scenario.schema import RunConfig
    from loopwright.spaces.space import Space

NAME = "dry-run"
_SHOWN = 3


def command(scenario: ScenarioFile, *, overrides: Overrides = None) -> None:
    """Show the space, the number of trials and the first commands of each run; nothing is run."""
    from rich.console import Console
    from rich.markup import escape

    from loopwright.scenario.load import load

    console = Console(highlight=False)
    loaded = load(scenario, set=overrides_of(overrides))
    runs, parallel = loaded.scenario.run, loaded.scenario.system.parallel
    name = escape(loaded.scenario.name)
    at_a_time = f", {_count(parallel, 'trial')} at a time" if any(run.rollout is None for run in runs) else ""
    console.print(f"[bold]{name}[/]: {_count(len(runs), 'run')}{at_a_time}")
    for run in runs:
        if run.rollout is not None:
            _show_rollout(console, run, loaded.directory)
        else:
            _show(console, run)


def _show(console: Any, run: "RunConfig") -> None:
    from rich.markup import escape
    from rich.table import Table

    agent = f"agent {run.agent.type}, seed {run.agent.seed}" if run.agent else "no agent: runs once"
    if run.workload is None:
        place = run.live.env_class or run.live.address if run.live else ""
        steps = run.agent.trials if run.agent else 0
        console.print(f"\n[bold]{run.name}[/]: {agent}; {_count(steps or 0, 'step')} in the live {place}")
        return
    space = run.workload.space(frozenset(run.env_params))
    console.print(f"\n[bold]{run.name}[/]: {agent}; {_trials(run, space)}")
    table = Table("parameter", "values", "chosen by", box=None, padding=(0, 2))
    for name, parameter in space.parameters.items():
        by = "environment" if name in space.drawn else "agent" if name in space.tunable else "fixed"
        table.add_row(escape(name), escape(_values(parameter)), by)
    console.print(table)
    for constraint in space.constraints:
        console.print(f"  constraint  {constraint}", markup=False)
    for line in _first_commands(run, space):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _show_rollout(console: Any, run: "RunConfig", home: Path) -> None:
    """How many rollouts, made of what, and the first prompts as they would be drawn."""
    from loopwright.reports.formatting import short
    from loopwright.rollouts.tasks.mix import TaskMix

    assert run.rollout is not None  # noqa: S101  the caller sees to it
    assert run.agent is not None  # noqa: S101  the loader sees to it
    rollout, size = run.rollout, getattr(run.agent, "group_size", 1)
    console.print(
        f"\n[bold]{run.name}[/]: agent {run.agent.type}, seed {run.agent.seed}; "
        f"{_count(run.agent.trials or 0, 'rollout')} in groups of {size}"
    )
    kinds = {"loop": rollout.loop.type, "judger": rollout.judger.type, "engine": run.engine.type if run.engine else "?"}
    lines = [f"{name:<8}  {kind}" for name, kind in kinds.items()]
    lines[0] += f", {_count(rollout.loop.concurrency, 'rollout')} at a time"
    lines += [f"on Ray    {ask}" for ask in rollout.resource_requests()]
    tasks = {source.label(): source.load(home) for source in rollout.tasks}
    weights = {source.label(): source.weight for source in rollout.tasks}
    lines += [f"tasks     {name}: {_count(len(tasks[name]), 'task')}, weight {weights[name]:g}" for name in tasks]
    mix = TaskMix(tasks, weights, run.agent.seed)
    lines.append("the first prompts:")
    for prompt in (mix.draw() for _ in range(_SHOWN)):
        lines.append(f"  {prompt.task.id}: {short(prompt.task.messages[-1].get('content', ''), 90)}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _trials(run: "RunConfig", space: "Space") -> str:
    size = "a continuum" if space.size is None else f"{space.size:,} points"
    if run.agent is None:
        return _count(run.repeats, "trial")
    planned = run.agent.trials or space.grid_size * run.repeats
    repeats = f", {run.repeats} repeats of each" if run.repeats > 1 else ""
    return f"{_count(planned, 'trial')} over {size}{repeats}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _values(parameter: Any) -> str:
    from loopwright.spaces.parameter import Choice, Range

    match parameter:
        case Choice():
            text = ", ".join(map(str, parameter.values))
        case Range():
            text = f"{parameter.low:g} … {parameter.high:g} {parameter.dtype}{', log' if parameter.log else ''}"
        case _:
            text = str(parameter.value)
    return f"{text}   when {parameter.when}" if parameter.when else text


def _pinned(run: "RunConfig", space: "Space") -> list[Any]:
    """The points that the agent was told to begin with."""
    start = getattr(run.agent, "start", ())
    return [space.first()] if start == "first" else [space.validate(point) for point in start]


def _first_commands(run: "RunConfig", space: "Space") -> list[str]:
    """The first trials: the start of the grid, or the first random points where the agent decides as it goes."""
    import shlex

    from loopwright.spaces.space import Draws
    from loopwright.workloads.command import CommandConfig
    from loopwright.workloads.template import CommandTemplate

    seed = run.agent.seed if run.agent else 0
    exact = run.agent is None or run.agent.type in ("grid", "random")
    grid = run.agent is None or run.agent.type == "grid"
    pinned = _pinned(run, space)
    drawn = space.points() if grid else (space.sample(seed, n) for n in itertools.count(1 + len(pinned)))
    points = itertools.chain(pinned, (point for point in drawn if not grid or point not in pinned))
    draws = Draws(seed, space.parameters, run.env_params)
    lines = [f"{'the first trials' if exact else 'trials such as'}:"]
    if isinstance(run.workload, CommandConfig) and run.workload.setup:
        lines.insert(0, f"set-up      {run.workload.setup}")
    shown = min(_SHOWN, run.agent.trials or _SHOWN) if run.agent else 1
    for number, action in enumerate(itertools.islice(points, shown), 1):
        arguments = space.arguments(action, draws.sample(number))
        if isinstance(run.workload, CommandConfig):
            variables = [f"{name}={arguments[name]}" for name in run.workload.env if name in arguments]
            lines.append(
                "  " + " ".join([*variables, shlex.join(CommandTemplate(run.workload.command).words(arguments))])
            )
        else:
            lines.append(f"  {arguments}")
    return lines
