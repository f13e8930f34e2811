"""The converter: CloudAI's files become the tables of one scenario."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from loopwright.cloudai.files import (
    ReadScenario,
    SystemFile,
    TestDefinition,
    TestRun,
    merge,
    read_scenario,
    read_system,
    seconds_of,
)
from loopwright.cloudai.templates import TRIAL_DIRECTORY, UNSET_TASKS, templates
from loopwright.core.agent import agents
from loopwright.core.errors import Problem, ScenarioError, did_you_mean
from loopwright.spaces.parameter import nested

_AGENTS = {"grid_search": "grid"}
"""Agents that have another name here."""
_REWARDS = ("inverse", "negative", "identity")
_CONDITIONS = {"start_post_init": "after_start", "end_post_comp": "after_start"}
_NSYS = {
    "sample": "-s {}",
    "output": "-o {}",
    "trace": "-t {}",
    "force_overwrite": "--force-overwrite={}",
    "capture_range": "--capture-range={}",
    "capture_range_end": "--capture-range-end={}",
    "cuda_graph_trace": "--cuda-graph-trace={}",
    "gpu_metrics_devices": "--gpu-metrics-devices={}",
}


@dataclass(frozen=True)
class Conversion:
    """A scenario as tables, and what the conversion has to say about it."""

    scenario: dict[str, Any]
    notes: tuple[str, ...]
    """What will differ from CloudAI."""
    output: Path
    """The directory in which CloudAI would put its results."""


def convert(
    system: str | Path,
    tests: str | Path | None,
    scenario: str | Path,
    *,
    hooks: str | Path | None = None,
    single_sbatch: bool = False,
) -> Conversion:
    """Convert CloudAI's files. A ScenarioError lists everything that cannot be converted."""
    system_file = read_system(Path(system))
    source = read_scenario(
        Path(scenario), None if tests is None else Path(tests), None if hooks is None else Path(hooks)
    )
    if single_sbatch and system_file.scheduler != "slurm":
        raise ScenarioError(system, [Problem("--single-sbatch", 'needs scheduler = "slurm".')])
    return _Converter(system_file, source, single_sbatch).convert()


@dataclass
class _Values:
    """`cmd_args` as the text of a command, and the lists among them, which are searched, by dotted name."""

    text: dict[str, Any] = field(default_factory=dict)
    searched: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, test: TestDefinition, args: Mapping[str, Any], prefix: str = "") -> "_Values":
        values = cls()
        for key, value in args.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                inner = cls.of(test, value, f"{name}.")
                values.text[key] = inner.text
                values.searched |= inner.searched
            elif isinstance(value, list) and not test.is_excluded(name):
                argument = ".".join(re.sub(r"\W", "_", part) for part in name.split("."))
                values.searched[argument] = value
                values.text[key] = f"{{{argument}}}"
            elif isinstance(value, bool):
                values.text[key] = value
            else:
                several = value if isinstance(value, list) else [value]
                values.text[key] = _literal(",".join(map(str, several)))
        return values


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


class _Converter:
    """Collects problems and notes while it converts one scenario."""

    def __init__(self, system: SystemFile, source: ReadScenario, single_sbatch: bool) -> None:
        self._system, self._source, self._single_sbatch = system, source, single_sbatch
        self._is_slurm = system.scheduler == "slurm"
        self._problems: list[Problem] = []
        self._notes: list[str] = []

    def convert(self) -> Conversion:
        runs = [self._run(run, test) for run, test in self._in_order()]
        names = [run["name"] for run in runs]
        for name in dict.fromkeys(n for n in names if names.count(n) > 1):
            self._problems.append(
                Problem("[[Tests]] id", f"{name!r} would be the folder of several tests; rename one.")
            )
        plain = [run["name"] for run in runs if "agent" not in run]
        if 0 < len(plain) < len(runs):
            text = f"searched and plain tests are mixed; {', '.join(plain)} has no list to search. Split the file."
            self._problems.append(Problem("[[Tests]]", text))
        scenario = {"name": self._source.config.name, "system": self._system_table(runs), "run": runs}
        if self._problems:
            raise ScenarioError(self._source.file, self._problems)
        return Conversion(scenario, tuple(self._notes), Path(self._system.output_path).expanduser())

    # -- the system -----------------------------------------------------------------------------------------------

    def _system_table(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not self._is_slurm:
            return {"type": "local"}
        system = self._system
        arguments = [f"--ntasks-per-node={system.ntasks_per_node}"] if system.ntasks_per_node else []
        arguments += [f"--distribution={system.distribution}"] if system.distribution else []
        arguments += [word for text in system.extra_sbatch_args for word in shlex.split(text)]
        reservation = re.search(r"--reservation[ =](\S+)", system.extra_srun_args or "")
        table = {
            "type": "slurm",
            "partition": system.default_partition,
            "account": system.account,
            "reservation": reservation[1] if reservation else None,
            "gpus": system.gpus_per_node,
            "launcher": "direct",  # each command begins with its own srun
            "arguments": arguments or None,
            "poll_s": max(1, system.monitor_interval) if system.monitor_interval is not None else None,
            "nodelist": self._same_nodes("nodes"),
            "exclude": self._same_nodes("exclude_nodes"),
        }
        if self._single_sbatch:
            sizes = [run["workload"].get("nodes", 1) for run in runs]
            counts = [max(size) if isinstance(size, list) else size for size in sizes]
            limits = [run["workload"].get("timeout_s") for run in runs]
            has_limit = all(limits) and not any("agent" in run for run in runs)
            total = (
                sum(limit * run.get("iterations", 1) for limit, run in zip(limits, runs, strict=True))
                if has_limit
                else None
            )
            table |= {"mode": "allocation", "nodes": max(counts), "time_limit_s": total}
        return {key: value for key, value in table.items() if value is not None}

    def _same_nodes(self, key: str) -> str | None:
        """The nodes that all tests name: a scenario has one list of them."""
        lists = {getattr(run, key) for run, _ in self._source.runs}
        if any(":" in node for nodes in lists for node in nodes):
            self._problems.append(Problem(f"[[Tests]] {key}", "groups are not supported; write the names of nodes."))
        elif len(lists) > 1:
            self._problems.append(Problem(f"[[Tests]] {key}", "differ between tests; split the file."))
        return ",".join(next(iter(lists))) or None

    # -- a test ---------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[tuple[TestRun, TestDefinition]]:
        """The tests, each after those that it depends on."""
        by_id = {run.id: (run, test) for run, test in self._source.runs}
        graph = {run.id: [one.id for one in run.dependencies] for run, _ in self._source.runs}
        try:
            return [by_id[one] for one in TopologicalSorter(graph).static_order()]
        except CycleError as error:
            circle = " → ".join(reversed(error.args[1]))
            raise ScenarioError(
                self._source.file, [Problem("[[Tests]] dependencies", f"these tests wait for one another: {circle}.")]
            ) from error

    def _run(self, run: TestRun, test: TestDefinition) -> dict[str, Any]:
        key = f"[[Tests]] {run.id}"
        values = self._values(key, test)
        nodes: Any = list(run.num_nodes) if isinstance(run.num_nodes, tuple) else run.num_nodes
        if run.nodes:
            nodes = sum(map(_count_nodes, run.nodes))
        env = {name: value if isinstance(value, list) else str(value) for name, value in self._env(test).items()}
        env_params = {name: param for name, param in test.env_params.items() if name in values.searched}
        for name in test.env_params.keys() - env_params.keys():
            self._problems.append(Problem(f"{key} env_params", f"{name!r} is not a list in cmd_args."))
        is_search = bool(
            values.searched.keys() - env_params.keys()
            or isinstance(nodes, list)
            or any(isinstance(value, list) for value in env.values())
        )
        command = self._command(run, test, values)
        for name in values.searched:
            if name not in test.env_params and not any(f"{{{name}}}" in word for word in command):
                text = f"is a list, but the command of {test.test_template_name} has no such argument; remove it."
                self._problems.append(Problem(f"{key} cmd_args.{name}", text))
        workload: dict[str, Any] = {"type": "command", "command": command}
        limits = [run.time_limit, *(run.time_limit for hook in self._source.hooks.values() for run, _ in hook.runs)]
        if run.time_limit is not None:
            workload["timeout_s"] = sum(seconds_of(limit) for limit in limits if limit is not None)
        if self._is_slurm:
            workload["nodes"] = nodes
        elif nodes != 1:
            self._notes.append(f"{run.id}: num_nodes is ignored on a standalone system")
        workload |= self._metrics(key, test, is_search)
        # A list of one value stays a dimension, as in CloudAI.
        workload["args"] = nested({n: v if len(v) > 1 else {"values": v} for n, v in values.searched.items()})
        workload["env"] = {name: {"values": v} if isinstance(v, list) else v for name, v in env.items()}
        table: dict[str, Any] = {"name": _run_name(run.id)}
        table |= self._search(key, test, env_params) if is_search else self._plain(run)
        if is_search and run.dependencies:
            self._problems.append(Problem(f"{key} dependencies", "a searched test cannot depend on others; remove it."))
        if test.env_params and not is_search:
            self._problems.append(Problem(f"{key} env_params", "need a search: make another argument a list."))
        return {**table, "workload": {k: v for k, v in workload.items() if v not in ({}, None)}}

    def _values(self, key: str, test: TestDefinition) -> _Values:
        """The arguments of a test; reports those that are missing or cannot be converted."""
        template = templates[test.test_template_name]
        args = {**template.defaults, **{name: v for name, v in test.cmd_args.items() if v is not None}}
        for name in template.required:
            if name not in args:
                self._problems.append(
                    Problem(f"{key} cmd_args.{name}", f"is missing; {test.test_template_name} needs it.")
                )
                args[name] = ""
        for name in template.unsupported:
            if args.pop(name, False):
                text = "needs the output of another test, which is not supported; give the file in extra_env_vars."
                self._problems.append(Problem(f"{key} cmd_args.{name}", text))
        for name in ("git_repos", "scripts"):
            if getattr(test, name):
                text = "nothing is installed; put it where the nodes see it, and mount it by extra_container_mounts."
                self._problems.append(Problem(f"{key} {name}", text))
        if isinstance(file := args.get("job_file"), str) and Path(file).exists():
            args["job_file"] = str(Path(file).absolute())  # each trial has its own directory
        for name, value in args.items():
            if value == []:
                self._problems.append(Problem(f"{key} cmd_args.{name}", "an empty list has nothing to choose from."))
        return _Values.of(test, args)

    def _env(self, test: TestDefinition) -> dict[str, Any]:
        return merge(self._system.global_env_vars, test.extra_env_vars)

    def _command(self, run: TestRun, test: TestDefinition, values: _Values) -> list[str]:
        """The command of a trial, inside what runs its hooks and reads its metrics."""
        template = templates[test.test_template_name]
        words = self._launched(run, test, values, "{nodes}")
        hooks = []
        for kind, option in (("pre_test", "--pre"), ("post_test", "--post")):
            for hook, hook_test in self._source.hooks[kind].runs if kind in self._source.hooks else ():
                hook_values = self._values(f"{kind} {hook.id}", hook_test)
                if hook_values.searched or isinstance(hook.num_nodes, tuple):
                    self._problems.append(Problem(f"{kind} {hook.id}", "a hook cannot have lists to search."))
                command = self._launched(hook, hook_test, hook_values, str(hook.num_nodes))
                variables = [_literal(f"{name}={value}") for name, value in hook_test.extra_env_vars.items()]
                # A hook has its own number of nodes, and with them its own number of tasks.
                variables = [*(UNSET_TASKS if self._is_slurm else ()), *variables]
                hooks += [option, shlex.join(["env", *variables, *command] if variables else command)]
        if not hooks and not template.metrics and not any(TRIAL_DIRECTORY in word for word in words):
            return words
        options = [word for text in template.options(test.cmd_args) for word in ("--option", text)]
        for name in (name for name, candidates in values.searched.items() if all(type(v) is bool for v in candidates)):
            # A searched flag is written without its value, or not at all.
            options += [f"--flag={word.partition('=')[0]}" for word in words if word.endswith(f"={{{name}}}")]
        job = [sys.executable, "-m", "loopwright.cloudai.job_main", test.test_template_name]
        return [*job, *hooks, *options, "--", *words]

    def _launched(self, run: TestRun, test: TestDefinition, values: _Values, nodes: str) -> list[str]:
        """The command of a test, started by srun on a cluster."""
        template = templates[test.test_template_name]
        args = values.text
        words = template.words(args, {name: _literal(str(value)) for name, value in test.extra_cmd_args.items()})
        words = self._nsys(test) + words
        image = template.image(args)
        if not self._is_slurm:
            if "{" not in words[0] and shutil.which(words[0]) is None:
                text = f"{words[0]!r} is not on this machine; install it, or use a Slurm system with a container image."
                self._problems.append(Problem(f"[[Tests]] {run.id}", text))
            if image is not None:
                self._notes.append(f"{run.id}: the container image is ignored on a standalone system")
            return words
        if not (srun := template.launcher(args, self._system.mpi)):
            return words
        srun.append(f"--nodes={nodes}")
        if image is not None:
            env = self._env(test)
            srun.append(f"--container-image={image}")
            srun.append(f"--container-mounts={_literal(','.join(self._mounts(test, env)))}")
            srun += [] if self._system.container_mount_home else ["--no-container-mount-home"]
            # Otherwise pyxis prefers the variables of the image.
            srun += [f"--container-env={','.join(env)}"] if env else []
        further = (self._system.extra_srun_args, *test.extra_srun_args, run.extra_srun_args)
        srun += [_literal(word) for text in further if text for word in shlex.split(text)]
        return srun + words

    def _mounts(self, test: TestDefinition, env: Mapping[str, Any]) -> list[str]:
        """What a container sees of its node, as in CloudAI: the trial's directory twice, and what was installed."""
        mounts = [f"{TRIAL_DIRECTORY}:/cloudai_run_results", TRIAL_DIRECTORY]
        if self._system.install_path and (installed := Path(self._system.install_path).expanduser()).is_dir():
            mounts.insert(1, f"{installed.absolute()}:/cloudai_install")
        mounts += [os.path.expandvars(mount) for mount in test.extra_container_mounts]
        if isinstance(topology := env.get("NCCL_TOPO_FILE"), str):
            mounts.append(f"{Path(topology).absolute()}:{Path(topology).absolute()}")
        return mounts

    def _nsys(self, test: TestDefinition) -> list[str]:
        if test.nsys is None or not test.nsys.get("enable", True):
            return []
        nsys = test.nsys
        words = [nsys.get("nsys_binary", "nsys"), nsys.get("task", "profile")]
        for key, option in _NSYS.items():
            if (value := nsys.get(key)) is not None:
                words += shlex.split(option.format(str(value).lower() if isinstance(value, bool) else value))
        return [_literal(word) for word in (*words, *nsys.get("extra_args", ()))]

    # -- what a run does ------------------------------------------------------------------------------------------

    def _metrics(self, key: str, test: TestDefinition, is_search: bool) -> dict[str, Any]:
        """Where metrics are read. Only those that the agent reads are required."""
        template = templates[test.test_template_name]
        if not template.metrics:
            return {"metrics": {"default": {"resource": "wall_s"}}}
        metrics = {}
        for name in map(_identifier, template.metrics):
            is_required = is_search and name == _identifier(test.agent_metrics[0])
            metrics[name] = {"json": f"/{name}", **({} if is_required else {"required": False})}
        return {"metrics": metrics, **({"success": {"regex": template.success}} if template.success else {})}

    def _plain(self, run: TestRun) -> dict[str, Any]:
        table: dict[str, Any] = {"iterations": run.iterations} if run.iterations > 1 else {}
        completed = "after_ok" if self._source.config.job_status_check else "after_any"
        depends_on = {}
        for one in run.dependencies:
            depends_on[_run_name(one.id)] = _CONDITIONS.get(one.type, completed)
            if one.type == "end_post_comp":
                text = f"starts once {one.id} has started, and runs to its own end or time limit"
                self._notes.append(f"{run.id}: end_post_comp: {text}; CloudAI would end it together with {one.id}")
        return table | ({"depends_on": depends_on} if depends_on else {})

    def _search(self, key: str, test: TestDefinition, env_params: Mapping[str, Any]) -> dict[str, Any]:
        """The agent, its reward and what the environment draws."""
        template = templates[test.test_template_name]
        metrics = [_identifier(name) for name in template.metrics or ("default",)]
        metric = _identifier(test.agent_metrics[0]) if test.agent_metrics else ""
        if metric not in metrics:
            hint = did_you_mean(metric, list(template.metrics or ("default",)))
            self._problems.append(Problem(f"{key} agent_metrics", f"no metric {metric!r}. {hint}"))
        if test.agent_reward_function not in _REWARDS:
            fix = 'convert the files, and write reward = { type = "expression", expression = "…" } into the result'
            text = f"{test.agent_reward_function!r} is not supported: {', '.join(_REWARDS)} are. Otherwise {fix}."
            self._problems.append(Problem(f"{key} agent_reward_function", text))
        config = dict(test.agent_config or {})
        agent: dict[str, Any] = {"type": _AGENTS.get(test.agent, test.agent)}
        if test.agent_steps is not None and agent["type"] != "grid":
            agent["trials"] = test.agent_steps
        if (seed := config.pop("random_seed", None)) is not None:
            agent["seed"] = seed
        if config.pop("start_action", "random") == "first":
            with suppress(KeyError, ImportError):  # the loader reports an unknown agent
                if "start" in agents.get(agent["type"]).Config.model_fields:
                    agent["start"] = "first"
                else:
                    self._notes.append(f"{key}: start_action is ignored: {test.agent} begins with its own policy")
        rewards = config.pop("rewards", {})
        table: dict[str, Any] = {
            "agent": {**agent, **config},
            "reward": {"type": test.agent_reward_function, "metrics": [metric]},
        }
        if rewards:
            table["rewards"] = rewards
        if env_params:
            weights = {n: {"weights": list(p.weights)} if p.weights is not None else {} for n, p in env_params.items()}
            table["env_params"] = weights
        return table


def _run_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text).lstrip(".-") or "test"


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _count_nodes(text: str) -> int:
    """How many nodes a name such as `node-[001-004,7]` stands for."""
    match = re.search(r"\[([^\]]*)\]", text)
    if match is None:
        return 1
    ranges = [part.split("-") for part in match[1].split(",")]
    return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
