"""`loopwright dry-run`: show what a scenario would do, and run nothing."""

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loopwright.cli.cloudai_files import CloudAi, Files, HookDir, SingleSbatch, load_files
from loopwright.cli.overrides import Overrides
from loopwright.reports.formatting import counted, short
from loopwright.reports.objective import Objective
from loopwright.rollouts.source_settings import describe_own
from loopwright.spaces.parameter import Choice, Range
from loopwright.spaces.space import Draws, Noise
from loopwright.workloads.base import CommandTemplate
from loopwright.workloads.command_config import CommandConfig

_EXAMPLES = 3


def command(
    scenario: Files,
    *,
    overrides: Overrides = None,
    cloudai: CloudAi = False,
    hook_dir: HookDir = None,
    single_sbatch: SingleSbatch = False,
) -> None:
    """Show the space, the number of trials and the first commands of each run. Runs nothing."""
    console = Console(highlight=False)
    loaded, _ = load_files(scenario, overrides, cloudai=cloudai, hook_dir=hook_dir, single_sbatch=single_sbatch)
    parallel = ""
    if any(run.kind in ("search", "live") for run in loaded.runs):
        parallel = f", {counted(loaded.scenario.system.parallel, 'trial')} at a time"
    console.print(f"[bold]{escape(loaded.scenario.name)}[/]: {counted(len(loaded.runs), 'run')}{parallel}")
    shows = {"search": _show_search, "live": _show_live, "rollout": _show_rollouts, "training": _show_rollouts}
    for run in loaded.runs:
        shows[run.kind](console, run, loaded.directory)


def _agent(run: Any) -> str:
    return f"agent {run.agent.type}, seed {run.agent.seed}" if run.agent else "no agent: runs once"


def _show_live(console: Console, run: Any, _: Path) -> None:
    place = run.live.env_class or run.live.address
    console.print(f"\n[bold]{run.name}[/]: {_agent(run)}; {counted(run.agent.trials or 0, 'step')} in the live {place}")


def _show_search(console: Console, run: Any, _: Path) -> None:
    space = run.space
    if run.agent is None:
        trials = counted(run.repeats, "trial")
    else:
        size = "a continuum" if space.size is None else f"{space.size:,} points"
        repeats = f", {run.repeats} repeats of each" if run.repeats > 1 else ""
        trials = f"{counted(run.agent.trials or space.grid_size * run.repeats, 'trial')} over {size}{repeats}"
    console.print(f"\n[bold]{run.name}[/]: {_agent(run)}; {trials}")
    table = Table("parameter", "values", "chosen by", box=None, padding=(0, 2))
    for name, parameter in space.parameters.items():
        by = "environment" if name in space.drawn else "agent" if name in space.tunable else "fixed"
        table.add_row(escape(name), escape(_values(parameter)), by)
    console.print(table)
    for objective in (Objective.of(function.label()) for function in run.reward):
        console.print(f"  {objective.direction:<10}  {objective.name}", markup=False)
    console.print(f"  metrics     {', '.join(run.metric_names) or 'none'}", markup=False)
    for constraint in space.constraints:
        console.print(f"  constraint  {constraint}", markup=False)
    for line in _first_trials(run):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _show_rollouts(console: Console, run: Any, directory: Path) -> None:
    """How many rollouts, what they consist of, and the first prompts as they would be drawn."""
    rollout, group_size = run.rollout, getattr(run.agent, "group_size", 1)
    amount = counted(run.agent.trials or 0, "rollout")
    if steps := getattr(run.agent, "steps", None):
        amount = f"{counted(steps, 'step')} of {counted(run.agent.prompts_per_step, 'prompt')}"
        amount += f" and at most {counted(run.agent.trials, 'rollout')}" if run.agent.trials else ""
    console.print(f"\n[bold]{run.name}[/]: {_agent(run)}; {amount} in groups of {group_size}")
    types = {"loop": rollout.loop.type, "judger": rollout.judger.type, "engine": run.engine.type}
    lines = [f"{name:<8}  {type}" for name, type in types.items()]
    lines[0] += f", {counted(rollout.loop.concurrency, 'rollout')} at a time"
    lines += [f"on Ray    {request}" for request in rollout.resource_requests(run.gateway, run.eval)]
    mix = run.task_mix(run.agent.seed, directory)
    counts = Counter(prompt.source for prompt in (*mix.prompts(), *mix.held_out()))
    settings = rollout.settings(run.eval)
    for source in rollout.tasks:
        name = source.label()
        own = describe_own(settings.pop(name).as_json())
        lines.append(f"tasks     {name}: {counted(counts[name], 'task')}, weight {source.weight:g}{own}")
    for name, held_out in settings.items():
        judger = "" if held_out.judger is rollout.judger else f"; judger {held_out.judger.type}"
        own = describe_own({key: own for key, own in held_out.as_json().items() if key != "judger"})
        lines.append(f"{name}: {counted(counts[name], 'task')}{judger}{own}")
    if mix.skipped:
        name, reason = next(iter(mix.skipped.items()))
        lines.append(f"left out  {counted(len(mix.skipped), 'task')}; the first: {name}: {reason}")
    lines.append("the first prompts:")
    for prompt in (mix.draw() for _ in range(_EXAMPLES)):
        lines.append(f"  {prompt.task.id}: {short(prompt.task.messages[-1].get('content', ''), 90)}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _values(parameter: Any) -> str:
    match parameter:
        case Choice():
            text = ", ".join(map(str, parameter.values))
        case Range():
            text = f"{parameter.low:g} … {parameter.high:g} {parameter.dtype}{', log' if parameter.log else ''}"
        case _:
            text = str(parameter.value)
    return f"{text}   when {parameter.when}" if parameter.when else text


def _first_trials(run: Any) -> Iterator[str]:
    """The first trials: the start of the grid, or the first random points where the agent decides as it learns."""
    space, workload = run.space, run.workload
    agent, seed = (run.agent.type, run.agent.seed) if run.agent else ("grid", 0)
    start = getattr(run.agent, "start", ())
    pinned = [space.first()] if start == "first" else [space.validate(point) for point in start]
    if agent == "grid":
        more = (point for point in space.points() if point not in pinned)
    else:
        more = (space.sample(seed, n) for n in itertools.count(1 + len(pinned)))
    if isinstance(workload, CommandConfig) and workload.setup:
        yield f"set-up      {workload.setup}"
    yield "the first trials:" if agent in ("grid", "random") else "trials such as:"
    draws, noise = Draws(seed, space.parameters, run.env_params), Noise(seed, run.noise)
    slot: dict[str, Any] = {}
    if isinstance(workload, CommandConfig):
        slot = {name: name.upper() for name in workload.slot_names()}  # known once a trial has its slot
    count = min(_EXAMPLES, run.agent.trials or _EXAMPLES) if run.agent else 1
    points: Iterator[Any] = itertools.chain(pinned, more)
    if agent not in ("grid", "random"):
        # Examples only, so a point that happens to be drawn twice is shown once, and a forbidden one is not.
        drawn_points = list(itertools.islice(points, 20 * count))
        allowed = [point for point in drawn_points if space.violated(point, {}) is None]
        points = iter([point for n, point in enumerate(allowed) if point not in allowed[:n]])
    for number, action in enumerate(itertools.islice(points, count), 1):
        problem = space.violated(action, draws.sample(number))
        drawn = noise.sample(0 if run.repeats > 1 else number - 1)
        arguments = {**slot, **space.arguments(action, {**draws.sample(number), **drawn})}
        if problem is not None:
            yield f"  infeasible, not run: {problem}"
        elif isinstance(workload, CommandConfig):
            variables = [f"{name}={arguments[name]}" for name in workload.env if name in arguments]
            yield "  " + " ".join([*variables, shlex.join(CommandTemplate(workload.command).words(arguments))])
            for service in workload.service:
                words = CommandTemplate(service.command).words(arguments)
                yield f"    beside {service.name}: {shlex.join(words)}"
        else:
            yield f"  {arguments}"
