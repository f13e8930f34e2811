"""Exports of rollouts: whole episodes, or flat rows for training. Both are streamed."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import ALL, Rollout, Selection, rollouts
from loopwright.reports.export import parquet_modules, replacement, write_lines

_BATCH = 256


def write_episodes(ledger: Ledger, directory: Path, which: Selection = ALL) -> Path:
    """`episodes.jsonl`: a whole episode per line, with the number of its trial."""
    return write_lines(directory / "episodes.jsonl", (rollout.as_json() for rollout in rollouts(ledger, which=which)))


def write_rows(ledger: Ledger, directory: Path, which: Selection = ALL) -> Path:
    """`rows.jsonl`: a row per branch, to train on."""
    every = (row for rollout in _training_rollouts(ledger, which) for row in rows_of(rollout))
    return write_lines(directory / "rows.jsonl", every)


def write_verl(ledger: Ledger, directory: Path, which: Selection = ALL) -> Path:
    """`verl.jsonl`: the same rows under the names of verl's AgentLoopOutput."""
    every = (row for rollout in _training_rollouts(ledger, which) for row in verl_of(rollout))
    return write_lines(directory / "verl.jsonl", every)


def write_parquet_rows(ledger: Ledger, directory: Path, which: Selection = ALL) -> Path:
    """`rows.parquet`: the rows of `rows.jsonl`, typed."""
    pa, pq = parquet_modules()
    ids = pa.list_(pa.int64())
    fields: dict[str, Any] = {
        **dict.fromkeys(("trial", "group"), pa.int64()),
        **dict.fromkeys(("task", "data_source", "outcome", "fault"), pa.string()),
        **dict.fromkeys(("trainable", "in_baseline"), pa.bool_()),
        **dict.fromkeys(("prompt_ids", "response_ids"), ids),
        "response_mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float64()),
        "versions": ids,
        "reward": pa.float64(),
        "parts": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema(fields)
    path = directory / "rows.parquet"
    every = (row for rollout in _training_rollouts(ledger, which) for row in rows_of(rollout))
    with replacement(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        while batch := list(islice(every, _BATCH)):
            records = [{**row, "parts": list(row["parts"].items())} for row in batch]
            writer.write_table(pa.Table.from_pylist(records, schema=schema))
    return path


def _training_rollouts(ledger: Ledger, which: Selection) -> Iterator[Rollout]:
    """All except those of evaluations, which must never be trained on."""
    return (rollout for rollout in rollouts(ledger, which=which) if rollout.evaluated is None)


def rows_of(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """The rows of an episode, each with its origin and whether it may be trained on."""
    episode = rollout.episode
    for row in episode.rows():
        yield {
            **_origin(rollout),
            "prompt_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "response_mask": row.response_mask,
            "logprobs": row.logprobs,
            "versions": row.versions,
            "reward": row.reward,
            "parts": dict(episode.rewards),
        }


def verl_of(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """The same rows under verl's names; fields it does not know are in `extra_fields`."""
    for row in rollout.episode.as_verl():
        yield {**row, "extra_fields": {**_origin(rollout), **row["extra_fields"]}}


def _origin(rollout: Rollout) -> dict[str, Any]:
    episode = rollout.episode
    return {
        "trial": rollout.number,
        "group": episode.group,
        "task": episode.task.id,
        "data_source": episode.task.data_source,
        "outcome": str(episode.outcome),
        "fault": None if episode.fault is None else str(episode.fault),
        "trainable": episode.trainable,
        "in_baseline": episode.in_baseline,
    }
