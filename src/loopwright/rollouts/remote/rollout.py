"""One trial of a remote agent: boot, agent, tests, the episode home, and everything let go, under one deadline."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loopwright.core.episode import Attempt, Episode
from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.base import Sampling
from loopwright.execution.base import Executor
from loopwright.execution.sandbox import Sandbox, SandboxInstance
from loopwright.execution.sandbox.files import remove, run_in_thread
from loopwright.gateway.client import CompletedSession, GatewayClient, GatewayLost, RemoteSession
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.remote.agent import AgentExit, AgentJob, ExternalAgent, instruction
from loopwright.rollouts.remote.blame import TimeLimit, verdict
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.verify import PreparedTask, VerifierReport, combine_reports, prepare, stage, verify
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import TaskStep

log = logging.getLogger(__name__)
Keep = Callable[[Path], None]
"""Looks at a workspace once agent and tests are done with it; it raises nothing."""
_RELEASE_S = 5.0
"""Seconds to let go of a session; a gateway that does not answer lets it expire."""
_KEEP_S = 5.0
"""Seconds to look at a workspace."""
_TEARDOWN_S = 1.0
"""Seconds that an episode waits until all is let go of. How much there is to delete is for the agent to decide, and
an agent must not be able to make its episode late by it."""
_TTL_S = 60.0
"""Seconds beyond the deadline after which a session expires whose opener was killed."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all trials of a worker share."""

    config: RemoteConfig
    run: str
    agent: ExternalAgent
    sandbox: Sandbox
    executor: Executor
    places: TaskLocator
    verifies: bool
    """Whether the task's tests are run."""
    leaving: set[asyncio.Task[None]] = field(default_factory=set)
    """What is still let go of, of trials whose episodes are there."""


class RemoteRollout:
    """One attempt at one task. Use it once."""

    def __init__(
        self,
        means: RolloutContext,
        client: GatewayClient,
        request: RolloutRequest,
        directory: Path,
        marker: str,
        keep: Keep | None = None,
    ) -> None:
        self._means, self._client, self._request = means, client, request
        self._directory, self._marker, self._keep = directory, marker, keep
        self._config = means.config
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()
        self._phases: dict[str, float] = {}
        self._captured: CompletedSession | None = None
        self._allowed = TimeLimit(self._config.deadline_s, "deadline_s")
        self._session: RemoteSession | None = None

    async def run(self) -> Episode:
        """The episode. GatewayLost if the gateway is; whatever else goes wrong is part of the episode."""
        stack = AsyncExitStack()
        stack.push_async_callback(run_in_thread, remove, self._directory)
        stack.push_async_callback(self._release)
        try:
            return await self._attempt(stack)
        except Refusal as error:
            if error.status != 404:
                raise GatewayLost(str(error)) from error
            reason = f"the gateway was started anew, and has not kept its sessions (--output): {error}"
            return self._episode(None, (Outcome.LOST, Fault.INFRA, reason), {})
        except GatewayLost:
            raise
        except (LoopwrightError, OSError) as error:
            outcome, fault = _blamed(error)
            return self._episode(None, (outcome, fault, str(error)), {})
        finally:
            # In a task of its own: neither a second cancellation nor haste must leave anything behind.
            leaving = asyncio.ensure_future(_let_go(stack))
            self._means.leaving.add(leaving)
            leaving.add_done_callback(self._means.leaving.discard)
            with self._phase("teardown"):
                await asyncio.wait({leaving}, timeout=_TEARDOWN_S)

    async def _attempt(self, stack: AsyncExitStack) -> Episode:
        with self._phase("boot"):
            try:
                async with asyncio.timeout_at(self._begun + self._config.deadline_s):
                    job, prepared = await self._boot(stack)
            except TimeoutError:
                reason = f"not begun within {self._config.deadline_s:g} s"
                return self._episode(None, (Outcome.LOST, Fault.INFRA, reason), {})
        ended, said = await self._work(job, prepared)
        if self._keep is not None:
            with self._phase("keep"), suppress(TimeoutError):
                await asyncio.wait_for(run_in_thread(self._keep, job.sandbox.workspace), _KEEP_S)
        captured = await self._collected(ended)
        found = verdict(ended, captured, self._config.limits(), self._allowed)
        seen = {} if ended is None else dict(ended.seen)
        evidence: dict[str, Any] = {"agent": {**seen, **self._means.agent.printed(job)}}
        if said and prepared is not None:
            evidence["verifier"] = combine_reports(prepared, said)
        return self._episode(captured, found, evidence)

    # -- its phases ---------------------------------------------------------------------------------------------

    async def _boot(self, stack: AsyncExitStack) -> tuple[AgentJob, PreparedTask | None]:
        request, means = self._request, self._means
        # New for each attempt: after a crash of ours the last one's session may still be there, with turns in it.
        id = f"trial-{'x' if request.trial is None else request.trial}-{secrets.token_hex(6)}"
        self._session = await self._client.open(id, self._terms())
        workspace = self._directory / "workspace"
        prepared = await asyncio.to_thread(self._laid_out, workspace)
        at, hide = (None, ()) if prepared is None else (prepared.workdir, prepared.hide)
        sandbox: SandboxInstance = await stack.enter_async_context(
            means.sandbox.open(workspace, allowed_urls=(self._session.openai_base_url,), mount_at=at, hide=hide)
        )
        env = {} if prepared is None else prepared.env
        task = request.task
        job = AgentJob(
            task,
            instruction(task),
            env,
            self._session,
            sandbox,
            self._directory,
            request.trial,
            f"{self._marker}.agent",
        )
        return job, prepared

    def _laid_out(self, workspace: Path) -> PreparedTask | None:
        workspace.mkdir(parents=True)
        (self._directory / "home").mkdir()
        return prepare(self._request.task, workspace, self._means.places, verifies=self._means.verifies)

    def _terms(self) -> SessionConfig:
        config, request = self._config, self._request
        # Without the task: whoever has the session's key can read its terms, and a label is nothing for an agent.
        return SessionConfig(
            run=self._means.run,
            trial=request.trial,
            sampling=_pinned(request.over(config.sampling)),
            seed=request.seed,
            calls=config.max_turns,
            tokens=config.max_tokens,
            ttl_s=config.deadline_s + _TTL_S,
        )

    async def _work(
        self, job: AgentJob, prepared: PreparedTask | None
    ) -> tuple[AgentExit | None, list[VerifierReport]]:
        """The agent and then the tests, for each step of the task; how the agent ended, and what the tests said."""
        tested = self._means.verifies and prepared is not None and prepared.tested
        steps: tuple[TaskStep | None, ...] = (None,) if prepared is None else prepared.steps
        said = list[VerifierReport]()
        for number, step in enumerate(steps):
            if step is not None and prepared is not None:
                job = replace(job, instruction=step.instruction)
                await asyncio.to_thread(stage, prepared, step, job.sandbox.workspace)
            ended = await self._agent(job, self._until(step, tested=tested))
            last = ended is None or bool(ended.failure) or number == len(steps) - 1
            if last:
                captured = await self._collected(ended)
                _, fault, _ = verdict(ended, captured, self._config.limits(), self._allowed)
                if fault not in (None, Fault.POLICY):  # it is tried again, or has no reward
                    break
            if tested and step is not None and prepared is not None:
                said.append(await self._verify(prepared, step, job.sandbox))
            if last or (step is not None and said and not step.goes_on(said[-1])):
                break
        return ended, said

    def _until(self, step: TaskStep | None, *, tested: bool) -> float:
        """When the agent has to be done: by the task's own limit, and early enough for what comes after it."""
        deadline_s, now = self._config.deadline_s, self._clock()
        verify_s = (self._config.verify_s or deadline_s / 4) if tested else 0.0
        until = self._begun + deadline_s - verify_s - min(2.0, 0.05 * deadline_s)
        own_s = None if step is None else step.agent_timeout_s
        if own_s is not None and now + own_s < until:
            self._allowed = TimeLimit(own_s, "agent.timeout_sec")
            return now + own_s
        self._allowed = TimeLimit(deadline_s - verify_s, "deadline_s less verify_s" if tested else "deadline_s")
        return until

    async def _agent(self, job: AgentJob, until: float) -> AgentExit | None:
        """How it ended; None if its time was up."""
        work = asyncio.ensure_future(self._means.agent.work(job))
        try:
            with self._phase("agent"):
                await asyncio.wait({work}, timeout=max(0.0, until - self._clock()))
            if work.done():
                return work.result()
            # First the session and then the agent: so it can be told whether the agent or the engine was slow.
            await self._collected(None)
            return None
        finally:
            if not work.done():
                work.cancel()
                with self._phase("teardown"):
                    await asyncio.wait({work})

    async def _verify(self, prepared: PreparedTask, step: TaskStep, sandbox: SandboxInstance) -> VerifierReport:
        means = self._means
        with self._phase("verify"):
            try:
                async with asyncio.timeout_at(self._begun + self._config.deadline_s):
                    return await verify(
                        prepared, step, sandbox, means.executor, self._directory, marker=f"{self._marker}.tests"
                    )
            except TimeoutError:
                said = f"were not done by the rollout's deadline of {self._config.deadline_s:g} s"
                return {"error": f"the tests {said}", "stopped": True}

    async def _collected(self, ended: AgentExit | None) -> CompletedSession:
        """What the session has recorded; it takes no more calls from now on."""
        if self._captured is None:
            if self._session is None:
                raise GatewayLost("the session was never opened")
            reason = str(self._allowed) if ended is None else ended.failure
            with self._phase("collect"):
                self._captured = await self._session.complete(Outcome.TRUNCATED if reason else Outcome.OK, reason)
        return self._captured

    async def _release(self) -> None:
        if self._session is not None and self._captured is None:
            with suppress(GatewayLost, Refusal, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._session.complete(Outcome.ABORTED, "its agent was given up")

    # -- what is told of it -------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - begun

    def _episode(
        self, captured: CompletedSession | None, found: tuple[Outcome, Fault | None, str], evidence: dict[str, Any]
    ) -> Episode:
        outcome, fault, reason = found
        task = self._request.task
        episode = Episode(task) if captured is None else replace(captured.episode, task=task)
        for attempt in episode.attempts:
            self._phases.update(attempt.phases_s)
        # The same mapping: what teardown takes is known only once the episode is made.
        attempt = Attempt(0.0, self._phases, outcome, reason)
        return replace(episode, outcome=outcome, fault=fault, reason=reason, attempts=(attempt,), evidence=evidence)


async def _let_go(stack: AsyncExitStack) -> None:
    try:
        await stack.aclose()
    except Exception as error:  # noqa: BLE001  whatever it is, it must not take the place of the episode
        log.warning("not all of a trial could be let go of: %s", describe_error(error))


def _pinned(sampling: Sampling) -> Sampling:
    """What an agent cannot change: how tokens are drawn, always; the rest where the config says something."""
    given = sampling.model_dump(include=sampling.model_fields_set)
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **given})


def _blamed(error: Exception) -> tuple[Outcome, Fault]:
    """A disk or a sandbox that fails is nobody's doing but ours; what is wrong with a task is the task's."""
    if isinstance(error, OSError):
        return Outcome.LOST, Fault.INFRA
    return Outcome.CRASHED, Fault.WORKLOAD
