"""The result of a trial: Harbor's `result.json`, with our episode added."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome
from loopwright.rollouts.trial_server.queue import TrialEntry
from loopwright.rollouts.trial_server.submission import Submission

_PHASES = {"boot": "environment_setup", "agent": "agent_execution", "verify": "verifier"}
"""Our phases, and their names in Harbor."""


def build_result(entry: TrialEntry, submission: Submission, episode: Episode, ended_at: float) -> dict[str, Any]:
    """The result of a trial that ended, as plain data."""
    task, evidence = episode.task, episode.evidence
    agent, verifier = evidence.get("agent", {}), evidence.get("verifier", {})
    rewards = verifier.get("rewards")
    program = submission.loop.agent or Path((submission.loop.command or ("agent",))[0]).name
    phases = dict(episode.attempts[-1].phases_s) if episode.attempts else {}
    started_at = entry.started_at or ended_at
    path = str(task.extra.get("local_task_path") or task.id)
    details = rollout_details(episode)
    return {
        "id": entry.id,
        "task_name": task.id,
        "trial_name": f"{submission.run or 'trial'}-{'x' if submission.trial is None else submission.trial}",
        "trial_uri": f"/trials/{entry.id}",
        "task_id": {"path": path},
        "source": task.data_source or None,
        "task_checksum": str(task.extra.get("task_hash", "")),
        "config": {"task": {"path": path}, "agent": {"name": program}},
        "agent_info": {"name": program, "version": "unknown"},
        "agent_result": {
            "n_input_tokens": sum(len(ids) for detail in details for ids in detail["prompt_token_ids"]),
            "n_output_tokens": episode.sampled,
            "rollout_details": details,
        },
        "verifier_result": None if rewards is None else {"rewards": rewards},
        "exception_info": _exception(episode, ended_at),
        "started_at": _time(started_at),
        "finished_at": _time(ended_at),
        **_timings(started_at, phases),
        # Fields that Harbor does not have.
        "attempts": entry.attempts,
        "outcome": str(episode.outcome),
        "rewards": rewards,
        "phases_s": phases,
        "exit_code": agent.get("exit_code"),
        "output": {name: agent.get(name, "") for name in ("stdout", "stderr")},
        "episode": episode.as_json(),
    }


def rollout_details(episode: Episode) -> list[dict[str, Any]]:
    """One conversation for each branch, turn by turn. Completions contain each sampled token once, and no others.

    Harbor has no masks: where tokens were inserted into a turn, the turn is split in two.
    """
    exported, details = set[int](), []
    for path in episode.branches():
        turns = list(_turns(episode, path, exported))
        exported.update(path)
        if turns:
            prompts, completions, logprobs = zip(*turns, strict=True)
            details.append(
                {
                    "prompt_token_ids": list(prompts),
                    "completion_token_ids": list(completions),
                    "logprobs": list(logprobs),
                }
            )
    return details


_Turn = tuple[list[int], list[int], list[float]]
"""Prompt, completion, and its logprobs."""


def _turns(episode: Episode, path: tuple[int, ...], exported: set[int]) -> Iterator[_Turn]:
    before: list[int] = []
    for index in path:
        node = episode.nodes[index]
        for start, stop in _ranges(node.spans) if index not in exported else ():
            yield [*before, *node.ids[:start]], list(node.ids[start:stop]), list(node.logprobs[start:stop])
        before += node.ids


def _ranges(spans: Any) -> list[tuple[int, int]]:
    """Ranges of sampled tokens without gaps, across versions of the policy."""
    joined: list[tuple[int, int]] = []
    for span in spans:
        if joined and joined[-1][1] == span.start:
            joined[-1] = (joined[-1][0], span.stop)
        else:
            joined.append((span.start, span.stop))
    return joined


def _exception(episode: Episode, at: float) -> dict[str, Any] | None:
    if episode.outcome is Outcome.OK:
        return None
    return {
        "exception_type": str(episode.outcome),
        "exception_message": episode.reason,
        "exception_traceback": "",
        "occurred_at": _time(at),
    }


def _timings(start: float, phases: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """Start and end of each phase; only durations are measured, so the phases are put one after the other."""
    names = [name for name in _PHASES if name in phases]
    edges = list(accumulate((phases[name] for name in names), initial=start))
    return {
        _PHASES[name]: {"started_at": _time(edges[number]), "finished_at": _time(edges[number + 1])}
        for number, name in enumerate(names)
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
