"""A learner on Ray Train: several workers that each compute a share of every batch and take the same steps.

Ray's `TorchTrainer` supervises the workers and their process group: gloo on CPUs, NCCL on GPUs. An actor holds the
queue of jobs, which every worker takes in order; the first worker returns the results.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import distributed as dist

from loopwright.execution.ray.connection import RayConnection
from loopwright.rollouts.pools.ray.launch import check_resources
from loopwright.rollouts.pools.resources import ResourceRequest, ResourcesError
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.learner import Learner, LearnerSettings, Team
from loopwright.trainers.learners import LocalLearner
from loopwright.trainers.sample import Sample

_POLL_S = 0.5


class _JobQueue:
    """Every worker takes every job, in order; the first worker returns the results."""

    def __init__(self) -> None:
        self._jobs: list[Any] = []
        self._results: dict[int, Any] = {}
        self._changed = asyncio.Condition()

    async def put(self, job: Any) -> int:
        async with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        return len(self._jobs) - 1

    async def job(self, number: int) -> Any:
        async with self._changed:
            await self._changed.wait_for(lambda: number < len(self._jobs))
        return self._jobs[number]

    async def set_result(self, number: int, value: Any) -> None:
        async with self._changed:
            self._results[number] = value
            self._jobs[: number + 1] = [None] * (number + 1)  # all workers have read them
            self._changed.notify_all()

    async def result(self, number: int) -> Any:
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._results)
        return self._results.pop(number)


class _RayTeam(Team):
    """The Ray Train workers as a team."""

    def __init__(self, *, shard: bool) -> None:
        context = train.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()
        self._shard = shard

    def join(self, module: Any) -> Any:
        if self._shard:
            return module
        return prepare_model(module, parallel_strategy_kwargs={"find_unused_parameters": False})

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        # On the device: NCCL supports only GPUs.
        values = torch.tensor(numbers, dtype=torch.float64, device=get_device())
        dist.all_reduce(values, operation)
        return [float(number) for number in values]

    def passes(self, batches: int) -> int:
        # Each pass needs all shards.
        return int(self.largest([max(batches, 1)])[0]) if self._shard else super().passes(batches)


def _work(config: dict[str, Any]) -> None:
    """The loop of each worker: one job after another, until a job is None."""
    settings, queue = replace(config["settings"], device=str(get_device())), config["queue"]
    team = _RayTeam(shard=settings.config.shard)
    learner = LocalLearner(settings, config["directory"], in_process=False, learner=Learner(settings, team))
    number = 0
    while (job := _wait(queue.job.remote(number))) is not None:
        method, args = job
        # All workers train and resume; only the first one returns weights and writes files.
        if method in ("update", "read") or team.rank == 0:
            result = getattr(learner, method)(*args)
        elif settings.config.shard:
            learner.learner.join_gather(checkpoint=method == "write")
        dist.barrier()  # all workers have read the job before it is removed
        if team.rank == 0:
            _wait(queue.set_result.remote(number, result))
        number += 1


def _wait(reference: Any) -> Any:
    return reference.future().result()


def _check_cluster(workers: int, cpus: float, gpus: float) -> None:
    """ResourcesError if the cluster is too small: Ray Train would wait forever."""
    check_resources([ResourceRequest("trainer", workers, cpus)])
    available: float = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
    if available < workers * gpus:
        raise ResourcesError(
            f"{workers} workers with {gpus:g} GPUs each were requested, but the Ray cluster has {available:g} GPUs. "
            "Set fewer `workers` or `gpus`, or remove `gpus` to train on CPUs."
        )


class RayLearner:
    """Ray Train workers, used as one learner."""

    def __init__(self, settings: LearnerSettings, directory: Path, *, workers: int, cpus: float, gpus: float) -> None:
        self._connection = RayConnection()
        try:
            _check_cluster(workers, cpus, gpus)
        except ResourcesError:
            self._connection.close()
            raise
        self._queue: Any = ray.remote(_JobQueue).options(num_cpus=0.01).remote()
        resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self._trainer = TorchTrainer(
            _work,
            train_loop_config={"settings": settings, "queue": self._queue, "directory": directory},
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
            run_config=RunConfig(storage_path=str(directory / "ray-train"), name="learner"),
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001  raised to the caller that waits for a result
            self._failure = error

    def _call(self, method: str, *args: Any) -> Any:
        number = _wait(self._queue.put.remote((method, args)))
        result = self._queue.result.remote(number).future()
        while True:
            try:
                return result.result(timeout=_POLL_S)
            except (FutureTimeout, TimeoutError):
                if not self._thread.is_alive():
                    reason = f"{type(self._failure).__name__}: {self._failure}" if self._failure else "ended early"
                    raise TrainingFailed(
                        f"the Ray Train workers are gone: {reason}. Their output is in Ray's logs."
                    ) from self._failure

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        metrics: dict[str, float] = self._call("update", list(samples), step)
        return metrics

    def weights(self) -> Any:
        return self._call("weights")

    def write(self, directory: Path) -> None:
        self._call("write", directory)

    def read(self, directory: Path) -> None:
        self._call("read", directory)

    def save(self, directory: Path) -> None:
        self._call("save", directory)

    def close(self) -> None:
        if self._thread.is_alive():
            _wait(self._queue.put.remote(None))
            self._thread.join(timeout=30)
        ray.kill(self._queue)
        self._connection.close()
