"""How a trial ended, and who caused it when it ended badly."""

import re
from enum import StrEnum


class Outcome(StrEnum):
    """How a trial ended. A trial in flight has none."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    INVALID = "invalid"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    METRIC_MISSING = "metric_missing"
    ABORTED = "aborted"
    LOST = "lost"
    STOPPED = "stopped"
    TRUNCATED = "truncated"
    FILTERED = "filtered"
    EXPIRED = "expired"
    JUDGE_FAILED = "judge_failed"


OUT_OF_TIME = "not finished within"
"""How the reason of a rollout begins that its deadline cut off."""
REUSABLE = frozenset({Outcome.OK, Outcome.INFEASIBLE})
"""The outcomes that the cache may answer with: a cached crash must not poison a search."""


class Fault(StrEnum):
    """Who caused a bad outcome. Only what the policy cannot cause may ever be discarded."""

    POLICY = "policy"
    WORKLOAD = "workload"
    INFRA = "infra"
    JUDGE = "judge"
    SYSTEM = "system"


FAULT_OF = {
    Outcome.INFEASIBLE: Fault.POLICY,
    Outcome.INVALID: Fault.POLICY,
    Outcome.CRASHED: Fault.WORKLOAD,
    Outcome.TIMEOUT: Fault.WORKLOAD,
    Outcome.METRIC_MISSING: Fault.WORKLOAD,
    Outcome.ABORTED: Fault.SYSTEM,
    Outcome.LOST: Fault.INFRA,
    Outcome.TRUNCATED: Fault.POLICY,
    Outcome.JUDGE_FAILED: Fault.JUDGE,
}
"""Who is at fault when nothing more specific is recorded."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def without_numbers(reason: str) -> str:
    """Equal for failures that are alike: the numbers of processes, lines and trials differ."""
    return _NUMBER.sub("#", reason)
