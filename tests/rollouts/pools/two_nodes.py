"""Rollouts on two Ray nodes, as a user runs them: `python -m tests.rollouts.pools.two_nodes DIRECTORY`.

In a process of its own, since a process has one Ray, and other tests have another. Writes `facts.json`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ray._private import utils
from ray.cluster_utils import Cluster

from loopwright.core.episode import Episode
from loopwright.ledger.ledger import Ledger

SCENARIO = """
name = "on-ray"
[system]
type = "ray"
{system}
[[run]]
name = "work"
agent = {{ type = "collect", trials = 24, group_size = 4 }}
[run.rollout]
tasks = {{ type = "python", function = "parts:tasks" }}
loop = {{ type = "parts:Where", {loop} }}
judger = {{ type = "python", function = "parts:judge", workers = 1, cpus = 0.1 }}
{rollout}
[run.engine]
type = "scripted"
script = "parts:script"
slip = 0.0
{gateway}
"""
PARTS = """
import os
import sys
from pathlib import Path
import ray
from loopwright import AgentLoop

def here():
    devices = ",".join(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))
    return f"{os.getpid()} {ray.util.get_node_ip_address()} {devices or '-'}"

def tasks():
    return [{"prompt": str(n)} for n in range(6)]

def judge(answer):
    return 1.0

def script(prompt, random):
    return here()

class Where(AgentLoop):
    async def run(self, task, session):
        turn = await session.turn(task.messages)
        note = (self.scenario_dir / "note.txt").read_text()
        import extra_package
        with open(os.environ["FACTS"], "a") as file:
            file.write(f"{here()}|{turn.message['content']}|{note}|{self.scenario_dir}|{Path(__file__).parent}|"
                       f"{extra_package.VALUE}\\n")
        return session.episode(task)
"""


def write(directory: Path, name: str, **parts: str) -> Path:
    """A scenario with code and a file beside it, and a package elsewhere."""
    scenario_dir = directory / name / "study"
    scenario_dir.mkdir(parents=True)
    package = directory / name / "lib" / "extra_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 'shipped'\n")
    (scenario_dir / "parts.py").write_text(PARTS)
    (scenario_dir / "note.txt").write_text("a note")
    file = scenario_dir / "study.toml"
    file.write_text(SCENARIO.format(**{"system": "", "loop": "workers = 2", "rollout": "", "gateway": "", **parts}))
    return file


def command(verb: str, file: Path, *arguments: str) -> dict[str, Any]:
    """Run the command line in another directory, so that nothing is found by accident."""
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", verb, str(file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "FACTS": str(file.parent.parent / "facts")},
        timeout=300,
    )
    print(done.stdout, done.stderr)
    return {"code": done.returncode, "error": done.stderr}


def run(file: Path) -> dict[str, Any]:
    """Run a scenario: where its loops and engines were, and how its rollouts ended."""
    output = file.parent.parent / "out"
    facts = command("run", file, "--output", str(output))
    lines = [line.split("|") for line in (file.parent.parent / "facts").read_text().splitlines()]
    loops, engines, notes, directories, modules, values = zip(*lines, strict=True)
    with Ledger.read(output / "work" / "ledger.db") as ledger:
        trials = list(ledger.trials())
    return facts | {
        "outcomes": sorted({str(trial.outcome) for trial in trials}),
        "trials": len(trials),
        "loops": sorted(set(loops)),
        "engines": sorted(set(engines)),
        "notes": sorted(set(notes)),
        "directories": sorted(set(directories)),
        "modules": sorted(set(modules)),
        "values": sorted(set(values)),
    }


def shipped(directory: Path) -> dict[str, Any]:
    """Working directory, package and variables shipped; loops where a custom resource is; two engines with GPUs."""
    system = (
        'runtime_env = { working_dir = ".", py_modules = ["../lib/extra_package"], '
        f'env_vars = {{ FACTS = "{directory}/shipped/facts" }} }}'
    )
    loop = "workers = 3, cpus = 0.1, resources = { left = 1 }, concurrency = 6"
    engines = 'engines = { workers = 2, cpus = 0.5, gpus = 1, strategy = "STRICT_SPREAD" }'
    file = write(directory, "shipped", system=system, loop=loop, rollout=engines)
    return run(file) | {"scenario_dir": str(file.parent)}


def gateways(directory: Path) -> dict[str, Any]:
    """Remote agents whose two gateways are on different nodes."""
    agent = directory / "gateways" / "study" / "agent.py"
    gateway = (
        '[run.gateway]\ntype = "ray"\nworkers = 2\ncpus = 0.1\nhost = "0.0.0.0"\nstrategy = "STRICT_SPREAD"\n'
        "[run.rollout.engines]\nworkers = 2\ncpus = 0.1\n"
    )
    file = write(directory, "gateways", gateway=gateway)
    loop = f"loop = {{ type = \"remote\", command = ['{sys.executable}', '{agent}'], workers = 2, cpus = 0.1 }}"
    file.write_text("\n".join(loop if "parts:Where" in line else line for line in file.read_text().splitlines()))
    agent.write_text(
        "import json, os, urllib.request\n"
        "url = os.environ['OPENAI_BASE_URL']\n"
        "body = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hello'}]}\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "request = urllib.request.Request(url + '/chat/completions', json.dumps(body).encode(), headers)\n"
        "urllib.request.urlopen(request).read()\n"
        "print(url.split('/')[2])\n"
    )
    output = directory / "gateways" / "out"
    facts = command("run", file, "--output", str(output))
    with Ledger.read(output / "work" / "ledger.db") as ledger:
        data = [ledger.payload(trial.number, "rollout") for trial in ledger.trials()]
    episodes = [Episode.from_bytes(each) for each in data if each is not None]
    hosts = Counter(str(episode.evidence["agent"]["stdout"]).strip() for episode in episodes)
    return facts | {"outcomes": sorted({str(each.outcome) for each in episodes}), "hosts": hosts}


def impossible(directory: Path) -> dict[str, Any]:
    """What the cluster can never provide: found by `verify`, and by `run` before anything is launched."""
    facts: dict[str, Any] = {}
    cases = {
        "gpus": "workers = 2, gpus = 3",
        "resource": "workers = 1, resources = { tpu = 1 }",
        "group": 'workers = 1, placement_group = "theirs"',
        "spread": 'workers = 3, cpus = 0.1, strategy = "STRICT_SPREAD"',
    }
    for name, loop in cases.items():
        file = write(directory, name, loop=loop)
        facts[name] = command("verify", file)
    facts["run"] = command("run", file, "--output", str(directory / "never"))
    return facts


def main(directory: Path) -> None:
    # Otherwise every ray.init() of this machine would connect to the cluster of this test.
    utils.write_ray_address = lambda *_, **__: None
    head = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=4, num_gpus=1, resources={"left": 3}, node_ip_address="127.0.0.2")
        os.environ["RAY_ADDRESS"] = cluster.address
        facts = {part.__name__: part(directory) for part in (shipped, gateways, impossible)}
        (directory / "facts.json").write_text(json.dumps(facts))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
