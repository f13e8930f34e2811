"""Whose fault it is: what became of a rollout, told from how its agent ended and what its session had recorded.

Only what the policy cannot have caused may be discarded. An agent that spoke with the policy and then broke may have
broken over what it was told, so it is scored; one that broke before its first call cannot have.
"""

from dataclasses import dataclass

from loopwright.core.outcome import Fault, Outcome
from loopwright.gateway.client import CompletedSession
from loopwright.gateway.sessions.session import SessionLimits
from loopwright.rollouts.loops.worker import STALLED_S
from loopwright.rollouts.remote.agent import AgentExit

Verdict = tuple[Outcome, Fault | None, str]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time that an agent has, and the key that says so."""

    time_s: float
    key: str

    def __str__(self) -> str:
        return f"not done within {self.time_s:g} s ({self.key})"


def verdict(ended: AgentExit | None, captured: CompletedSession, limits: SessionLimits, allowed: TimeLimit) -> Verdict:
    """The outcome, who caused it, and the reason; `ended` is None for an agent whose time was up."""
    episode = captured.episode
    if captured.broken:
        return Outcome.LOST, Fault.INFRA, captured.broken
    if limits.tokens is not None and episode.sampled >= limits.tokens:
        return Outcome.TRUNCATED, Fault.POLICY, f"all {limits.tokens} tokens are used up"
    if captured.restored and (ended is None or ended.failure):
        how = allowed if ended is None else ended.failure
        return Outcome.LOST, Fault.INFRA, f"{how}; the gateway was started anew meanwhile"
    if ended is None:
        return _late(captured, allowed)
    if not ended.failure:
        return Outcome.OK, None, "" if episode.turns else "the agent never called the model"
    if ended.infra:
        return Outcome.LOST, Fault.INFRA, ended.failure
    if not episode.turns:
        return Outcome.CRASHED, Fault.WORKLOAD, f"{ended.failure}, without a word from the model"
    if limits.turns is not None and episode.turns >= limits.turns:
        return Outcome.TRUNCATED, Fault.POLICY, f"all {limits.turns} turns are used up; {ended.failure}"
    turns = "1 turn" if episode.turns == 1 else f"{episode.turns} turns"
    return Outcome.TRUNCATED, Fault.POLICY, f"{ended.failure}, after {turns}"


def _late(captured: CompletedSession, allowed: TimeLimit) -> Verdict:
    if captured.silent_s >= min(STALLED_S, allowed.time_s / 2):
        return Outcome.LOST, Fault.INFRA, f"{allowed}; the engine gave no token for {captured.silent_s:.3g} s"
    if not captured.episode.turns:
        return Outcome.TIMEOUT, Fault.WORKLOAD, f"{allowed}; the agent never called the model"
    return Outcome.TRUNCATED, Fault.POLICY, f"{allowed}; the agent was still at work"
