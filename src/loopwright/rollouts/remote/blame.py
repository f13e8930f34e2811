"""Who caused the outcome of a rollout, from how its agent ended and what its session recorded.

Only rollouts that the policy cannot have broken may be discarded. An agent that got answers from the policy and then
failed may have failed because of them, so it is scored; an agent that failed before its first call cannot have.
"""

from dataclasses import dataclass
from typing import NamedTuple

from loopwright.core.outcome import OUT_OF_TIME, Fault, Outcome
from loopwright.gateway.client import CompletedSession
from loopwright.gateway.sessions.session import SessionLimits
from loopwright.rollouts.remote.agent import AgentExit


class Blame(NamedTuple):
    """The outcome of a rollout, who caused it, and why."""

    outcome: Outcome
    fault: Fault | None
    reason: str


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time that an agent has, and the configuration key that sets it."""

    time_s: float
    key: str

    def __str__(self) -> str:
        return f"{OUT_OF_TIME} {self.time_s:g} s ({self.key})"


def assign_blame(
    exit: AgentExit | None,
    session: CompletedSession,
    limits: SessionLimits,
    time_limit: TimeLimit,
    engine_failure: str = "",
) -> Blame:
    """What became of a rollout; `exit` is None for an agent that ran out of time, or whose engine did."""
    turns, failure = session.episode.turns, exit.failure if exit is not None else str(time_limit)
    if session.broken:
        return Blame(Outcome.LOST, Fault.INFRA, session.broken)
    if limits.tokens is not None and session.episode.sampled >= limits.tokens:
        return Blame(Outcome.TRUNCATED, Fault.POLICY, f"token limit of {limits.tokens} reached")
    if session.restored and failure:
        return Blame(Outcome.LOST, Fault.INFRA, f"{failure}; the gateway restarted during the rollout")
    if exit is None:
        if engine_failure:
            return Blame(Outcome.LOST, Fault.INFRA, engine_failure)
        if not turns:
            return Blame(Outcome.TIMEOUT, Fault.WORKLOAD, f"{failure}; the agent never called the model")
        return Blame(Outcome.TRUNCATED, Fault.POLICY, f"{failure}; the agent was still working")
    if not failure:
        return Blame(Outcome.OK, None, "" if turns else "the agent never called the model")
    if exit.infra or exit.fault is Fault.INFRA:
        return Blame(Outcome.LOST, Fault.INFRA, failure)
    if exit.fault is Fault.WORKLOAD:
        return Blame(Outcome.CRASHED, Fault.WORKLOAD, failure)
    if not turns:
        return Blame(Outcome.CRASHED, Fault.WORKLOAD, f"{failure}, before any answer of the model")
    if limits.turns is not None and turns >= limits.turns:
        return Blame(Outcome.TRUNCATED, Fault.POLICY, f"turn limit of {limits.turns} reached; {failure}")
    return Blame(Outcome.TRUNCATED, Fault.POLICY, f"{failure}, after {turns} turn{'' if turns == 1 else 's'}")
