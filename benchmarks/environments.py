"""An environment of verifiers: our rollouts of it against verifiers' own evaluation, with the same engine.

Both sample through our gateway with 64 rollouts at a time, in verifiers' interpreter, in turn. Ours has the ledger,
the judger and the report; theirs writes nothing, so a busy disk delays ours only: the best round of each counts, and
CPU time stands beside it. A search of the whole heap for garbage, most of it imported modules, takes a third of a
round, and into which rounds it falls is chance. So before each round what is alive is frozen, which takes it out of
these searches, for both alike. `python -m benchmarks.environments` is what runs there.
"""

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / ".venvs" / "verifiers" / "bin" / "python"
_EXAMPLE = _ROOT / "examples" / "environments"
_COUNT, _ROUNDS, _PROCESSES = 200, 6, 3


def run() -> Iterator[Ratio]:
    """Our time over that of verifiers; the rewards must be equal."""
    if not _PYTHON.exists():
        print("environments: skipped, since verifiers is not installed: run `make .venvs/verifiers/.ready`")
        return
    command = [str(_PYTHON), "-m", "benchmarks.environments"]
    ratios = []
    for _ in range(_PROCESSES):
        output = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
        figures = json.loads(output.splitlines()[-1])
        ours, theirs = (min(figures["wall"][name]) for name in ("ours", "theirs"))
        cpu = min(figures["cpu"]["ours"]) / min(figures["cpu"]["theirs"])
        detail = f"{_COUNT} rollouts with a tool: {ours:.2f} s against {theirs:.2f} s; "
        detail += f"CPU time {cpu:.2f} ×; equal rewards: {figures['equal']}"
        ratios.append((ours / theirs if figures["equal"] else float("inf"), detail))
    ratios.sort()
    (best, _), (usual, detail), (worst, _) = ratios[0], ratios[_PROCESSES // 2], ratios[-1]
    detail += f"; {best:.2f} to {worst:.2f} × in {_PROCESSES} processes"
    yield Ratio("verifiers' environment", usual if isfinite(worst) else worst, 1.2, detail=detail)


def _ours(directory: Path) -> dict[int, float]:
    import loopwright
    from loopwright.ledger.ledger import Ledger

    tasks = {"type": "verifiers", "env": "sums_env", "args": {"count": _COUNT}}
    agent = {"type": "collect", "trials": _COUNT, "group_size": 1, "batch": _COUNT}
    engine = {"type": "scripted", "script": "policy:calculator", "slip": 0.0}
    table = {"name": "collect", "agent": agent, "rollout": {"tasks": tasks}, "engine": engine}
    loopwright.run({"name": "ours", "run": [table]}, directory, progress=False)
    with Ledger.read(directory / "collect" / "ledger.db") as ledger:
        return {trial.action["index"]: trial.reward.value for trial in ledger.trials() if trial.reward}


async def _theirs() -> dict[int, float]:
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    from loopwright.engines import ScriptedConfig, ScriptedEngine
    from loopwright.gateway import Gateway
    from loopwright.rollouts.tasks.verifiers import load

    environment: Any = load("sums_env", json.dumps({"count": _COUNT}))
    engine = ScriptedEngine(ScriptedConfig(type="scripted", script="policy:calculator", slip=0.0), _EXAMPLE)
    async with Gateway(engine) as gateway:
        session = await gateway.open("evaluation")
        async with AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key) as sdk:
            client = OpenAIChatCompletionsClient(sdk)
            results = await environment.generate(environment.get_dataset(), client, "policy", max_concurrent=64)
    return {output["example_id"]: output["reward"] for output in results["outputs"]}


def _measure() -> dict[str, Any]:
    sys.path.insert(0, str(_EXAMPLE))
    figures: dict[str, Any] = {kind: {"ours": [], "theirs": []} for kind in ("wall", "cpu")}
    figures["equal"] = True
    contenders: dict[str, Callable[[Path], dict[int, float]]] = {
        "ours": _ours,
        "theirs": lambda _: asyncio.run(_theirs()),
    }
    for number in range(_ROUNDS + 1):  # the first is to warm up
        rewards = {}
        # Each goes first in every second round.
        for name in sorted(contenders, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as directory:
                gc.collect()
                gc.freeze()
                start_s, cpu_start_s = time.perf_counter(), time.process_time()
                rewards[name] = contenders[name](Path(directory))
                if number:
                    figures["wall"][name].append(time.perf_counter() - start_s)
                    figures["cpu"][name].append(time.process_time() - cpu_start_s)
        ours, theirs = rewards["ours"], rewards["theirs"]
        figures["equal"] &= ours.keys() == theirs.keys() and all(abs(ours[key] - theirs[key]) < 1e-9 for key in ours)
    return figures


if __name__ == "__main__":
    print(json.dumps(_measure()))
