"""A learner on Ray Train: several workers, each with a share of every batch, that take the same steps together.

Ray's `TorchTrainer` keeps the workers and their process group: gloo on CPUs, NCCL on GPUs. What is to be done next lies
at a desk, an actor where they look for work; the first of them says how it went.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import distributed as dist

from loopwright.rollouts.pools.ray.launch import RayConnection, check_resources
from loopwright.rollouts.pools.resources import ResourceRequest, ResourcesError
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.learner import Learner, LearnerSettings
from loopwright.trainers.learners import LocalLearner
from loopwright.trainers.sample import Sample

_POLL_S = 0.5


class _Desk:
    """Where work lies. Every worker takes every job, in order; answers come from the first worker."""

    def __init__(self) -> None:
        self._jobs: list[Any] = []
        self._answers: dict[int, Any] = {}
        self._news = asyncio.Condition()

    async def put(self, job: Any) -> int:
        async with self._news:
            self._jobs.append(job)
            self._news.notify_all()
        return len(self._jobs) - 1

    async def job(self, number: int) -> Any:
        async with self._news:
            await self._news.wait_for(lambda: number < len(self._jobs))
        return self._jobs[number]

    async def answer(self, number: int, value: Any) -> None:
        async with self._news:
            self._answers[number] = value
            self._jobs[: number + 1] = [None] * (number + 1)  # all of them have it by now
            self._news.notify_all()

    async def answered(self, number: int) -> Any:
        async with self._news:
            await self._news.wait_for(lambda: number in self._answers)
        return self._answers.pop(number)


class _RayTeam:
    """The workers of Ray Train."""

    def __init__(self, *, shard: bool) -> None:
        context = train.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()
        self._shard = shard

    def join(self, module: Any) -> Any:
        if self._shard:
            return module
        return prepare_model(module, parallel_strategy_kwargs={"find_unused_parameters": False})

    def total(self, numbers: Sequence[float]) -> list[float]:
        # Where the others' are: NCCL knows GPUs alone.
        sums = torch.tensor(numbers, dtype=torch.float64, device=get_device())
        dist.all_reduce(sums)
        return [float(number) for number in sums]

    def passes(self, own: int) -> int:
        if not self._shard:
            return max(own, 1)
        most = torch.tensor(max(own, 1), device=get_device())  # each pass needs the parts of everyone
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)


def _work(config: dict[str, Any]) -> None:
    """What each worker does: one job after another, until there is none."""
    setting, desk = replace(config["setting"], device=str(get_device())), config["desk"]
    team = _RayTeam(shard=setting.config.shard)
    learner = LocalLearner(setting, config["directory"], near=False, learner=Learner(setting, team))
    number = 0
    while (job := _got(desk.job.remote(number))) is not None:
        what, args = job
        # Everyone learns and restores; what is told or written, the first one tells and writes.
        if what in ("update", "read") or team.rank == 0:
            answer = getattr(learner, what)(*args)
        elif setting.config.shard:
            learner.learner.hand_over(everything=what == "write")
        dist.barrier()  # nobody is still reading the job when its place is cleared
        if team.rank == 0:
            _got(desk.answer.remote(number, answer))
        number += 1


def _got(reference: Any) -> Any:
    return reference.future().result()


def _check(workers: int, cpus: float, gpus: float) -> None:
    """Ray Train would wait for what the cluster does not have."""
    check_resources([ResourceRequest("trainer", workers, cpus)])
    there: float = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
    if there < workers * gpus:
        raise ResourcesError(
            f"the trainer asks for {workers} workers with {gpus:g} GPUs each, but the Ray cluster has {there:g} GPUs. "
            "Ask for fewer `workers` or `gpus`, or leave `gpus` out to train on CPUs."
        )


class RayLearner:
    """Workers of Ray Train, which learn as one."""

    def __init__(self, setting: LearnerSettings, directory: Path, *, workers: int, cpus: float, gpus: float) -> None:
        self._connection = RayConnection()
        try:
            _check(workers, cpus, gpus)
        except ResourcesError:
            self._connection.close()
            raise
        self._desk: Any = ray.remote(_Desk).options(num_cpus=0.01).remote()
        resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self._trainer = TorchTrainer(
            _work,
            train_loop_config={"setting": setting, "desk": self._desk, "directory": directory},
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
            run_config=RunConfig(storage_path=str(directory / "ray-train"), name="learner"),
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001  whoever waits for an answer is told
            self._failure = error

    def _asked(self, what: str, *args: Any) -> Any:
        number = _got(self._desk.put.remote((what, args)))
        answer = self._desk.answered.remote(number).future()
        while True:
            try:
                return answer.result(timeout=_POLL_S)
            except (NotYet, TimeoutError):
                if not self._thread.is_alive():
                    said = f"{type(self._failure).__name__}: {self._failure}" if self._failure else "it ended early"
                    raise TrainingFailed(
                        f"the workers of Ray Train are gone: {said}. What they wrote is in Ray's logs."
                    ) from self._failure

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        told: dict[str, float] = self._asked("update", list(samples), step)
        return told

    def weights(self) -> Any:
        return self._asked("weights")

    def write(self, directory: Path) -> None:
        self._asked("write", directory)

    def read(self, directory: Path) -> None:
        self._asked("read", directory)

    def save(self, directory: Path) -> None:
        self._asked("save", directory)

    def close(self) -> None:
        if self._thread.is_alive():
            _got(self._desk.put.remote(None))
            self._thread.join(timeout=30)
        ray.kill(self._desk)
        self._connection.close()
