"""One rollout of a remote agent: prepare, agent, tests, collect the episode and clean up, under one deadline."""

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
from loopwright.engines.base import PENALTIES, Sampling
from loopwright.execution.base import Executor
from loopwright.execution.files import remove, run_in_thread
from loopwright.execution.sandbox import Sandbox, SandboxError, SandboxInstance
from loopwright.gateway.client import CompletedSession, GatewayLost
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown
from loopwright.rollouts.remote.agent import AgentExit, AgentJob, ExternalAgent, last_user_message
from loopwright.rollouts.remote.blame import Blame, TimeLimit, assign_blame
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import AgentSession, SessionOpener
from loopwright.rollouts.remote.verify import PreparedTask, VerifierReport, combine_reports, prepare, stage, verify
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.harbor.task import TaskStep

log = logging.getLogger(__name__)
WorkspaceHook = Callable[[Path], None]
"""Inspects a workspace after agent and tests have ended; must not raise."""
_RELEASE_S = 5.0
"""Seconds to close a session; if the gateway does not answer, the session expires."""
_HOOK_S = 5.0
"""Seconds to inspect a workspace."""
_TEARDOWN_S = 1.0
"""Seconds that an episode waits for the clean-up. How much there is to delete depends on the agent, which must not be
able to delay its episode in this way."""
_LEAST_VERIFY_S = 1.0
"""Seconds that tests get in any case."""
_POLL_SHARE = 0.05
"""How often an agent that waits for its engine is looked at, as a share of its deadline."""
_SESSION_TTL_S = 60.0
"""Seconds after the deadline at which the session of a killed worker expires."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all rollouts of a worker share."""

    config: RemoteConfig
    run: str
    agent: ExternalAgent
    sandbox: Sandbox
    executor: Executor
    locator: TaskLocator
    run_tests: bool
    """Whether the task's tests are run."""
    teardowns: set[asyncio.Task[None]] = field(default_factory=set)
    """Clean-ups of finished rollouts that still run."""


class RemoteRollout:
    """One attempt at one task. Use it once."""

    def __init__(
        self,
        context: RolloutContext,
        sessions: SessionOpener,
        request: RolloutRequest,
        directory: Path,
        marker: str,
        on_workspace: WorkspaceHook | None = None,
        *,
        has_directory: bool = True,
    ) -> None:
        self._has_directory = has_directory
        """Whether it has files: a function that takes no workspace, for a task without a directory, needs none."""
        self._context, self._sessions, self._request = context, sessions, request
        self._directory, self._marker, self._on_workspace = directory, marker, on_workspace
        self._config = context.config
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._phases: dict[str, float] = {}
        self._time_limit = TimeLimit(self._config.deadline_s, "deadline_s")
        self._engine_s, self._engine_failure = 0.0, ""
        self._session: AgentSession | None = None
        self._completed: CompletedSession | None = None

    async def run(self) -> Episode:
        """The episode. GatewayLost if the gateway is lost, PoolDown if there is no sandbox any more, such as after the
        end of its daemon; every other failure is recorded in the episode.
        """
        stack = AsyncExitStack()
        if self._has_directory:
            stack.push_async_callback(run_in_thread, remove, self._directory)
        stack.push_async_callback(self._release_session)
        try:
            return await self._attempt(stack)
        except Refusal as error:
            if error.status != 404:
                raise GatewayLost(str(error)) from error
            reason = f"the gateway restarted without its sessions (start it with --output): {error}"
            return self._episode(None, Blame(Outcome.LOST, Fault.INFRA, reason), {})
        except (GatewayLost, PoolDown):
            raise
        except OSError as error:  # a disk or a sandbox that fails
            if isinstance(error, SandboxError) and not self._config.workers:
                try:  # whether a further rollout could open its sandbox
                    await asyncio.to_thread(self._context.sandbox.check)
                except SandboxError as problem:
                    raise PoolDown(str(problem)) from problem
            return self._episode(None, Blame(Outcome.LOST, Fault.INFRA, str(error)), {})
        except LoopwrightError as error:
            return self._episode(None, Blame(Outcome.CRASHED, Fault.WORKLOAD, str(error)), {})
        finally:
            # In a separate task: it must finish even if this one is cancelled again or out of time.
            teardown = asyncio.ensure_future(_close(stack))
            self._context.teardowns.add(teardown)
            teardown.add_done_callback(self._context.teardowns.discard)
            with self._phase("teardown"):
                await asyncio.wait({teardown}, timeout=_TEARDOWN_S)

    async def _attempt(self, stack: AsyncExitStack) -> Episode:
        with self._phase("boot"):
            try:
                async with asyncio.timeout_at(self._start + self._config.deadline_s):
                    job, prepared = await self._boot(stack)
            except TimeoutError:
                reason = f"not started within {self._config.deadline_s:g} s"
                return self._episode(None, Blame(Outcome.LOST, Fault.INFRA, reason), {})
        self._start = self._clock()  # an image that was built, or waited for, takes no time from the agent
        exit, reports = await self._run_steps(job, prepared)
        if self._on_workspace is not None:
            with self._phase("keep"), suppress(TimeoutError):
                await asyncio.wait_for(run_in_thread(self._on_workspace, job.sandbox.workspace), _HOOK_S)
        completed = await self._complete(exit)
        blame = self._blame(exit, completed)
        details = {} if exit is None else dict(exit.details)
        evidence: dict[str, Any] = {"agent": {**details, **self._context.agent.output(job)}}
        if reports and prepared is not None:
            evidence["verifier"] = combine_reports(prepared, reports)
        return self._episode(completed, blame, evidence)

    # -- phases -------------------------------------------------------------------------------------------------

    async def _boot(self, stack: AsyncExitStack) -> tuple[AgentJob, PreparedTask | None]:
        request, context, config = self._request, self._context, self._config
        # A new id for each attempt: after a crash, the session of the last attempt may still exist, with turns in it.
        id = f"trial-{'x' if request.trial is None else request.trial}-{secrets.token_hex(6)}"
        # What an agent cannot change: how tokens are drawn, and what the configuration sets.
        sampling = request.merge_sampling(config.sampling)
        fixed = Sampling().model_dump(include={"temperature", "top_p", "top_k", "min_p", "guide", *PENALTIES})
        fixed |= sampling.model_dump(include=sampling.model_fields_set)
        session_config = SessionConfig(  # without the task: everyone with the session's key could read its label
            run=context.run,
            trial=request.trial,
            owner_key=secrets.token_urlsafe(24),  # or its agent could delete it, and with it its failure
            sampling=Sampling(**fixed),
            seed=request.seed,
            calls=config.max_turns,
            tokens=config.max_tokens,
            ttl_s=2 * config.deadline_s + _SESSION_TTL_S,  # the boot may take as long as the agent
        )
        self._session = await self._sessions.open(id, session_config)
        disk = self._directory
        if self._has_directory:
            disk = await stack.enter_async_context(context.sandbox.disk(self._directory))
        workspace = disk / "workspace"

        def prepare_workspace() -> PreparedTask | None:
            workspace.mkdir(parents=True)
            (self._directory / "home").mkdir()
            return prepare(request.task, workspace, context.locator, context.sandbox, run_tests=context.run_tests)

        prepared = await asyncio.to_thread(prepare_workspace) if self._has_directory else None
        options = {} if prepared is None else prepared.sandbox_options
        sandbox: SandboxInstance = await stack.enter_async_context(
            context.sandbox.open(workspace, allowed_urls=(self._session.openai_base_url,), **options)
        )
        job = AgentJob(
            request.task,
            last_user_message(request.task),
            {} if prepared is None else prepared.env,
            self._session,
            sandbox,
            self._directory,
            request.trial,
            f"{self._marker}.agent",
        )
        return job, prepared

    async def _run_steps(
        self, job: AgentJob, prepared: PreparedTask | None
    ) -> tuple[AgentExit | None, list[VerifierReport]]:
        """The agent and then the tests, for each step of the task: the agent's last exit, and the test reports."""
        tested = self._context.run_tests and prepared is not None and prepared.task.has_tests
        steps: tuple[TaskStep | None, ...] = (None,) if prepared is None else prepared.task.steps
        reports = list[VerifierReport]()
        for number, step in enumerate(steps):
            if step is not None and prepared is not None:
                job = replace(job, instruction=step.instruction)
                await asyncio.to_thread(stage, prepared, step, job.sandbox.workspace)
            exit = await self._run_agent(job, self._agent_deadline(step, tested=tested))
            last = exit is None or bool(exit.failure) or number == len(steps) - 1
            if last:
                blame = self._blame(exit, await self._complete(exit))
                if blame.fault not in (None, Fault.POLICY):  # it is tried again, or has no reward
                    break
            if tested and step is not None and prepared is not None:
                reports.append(await self._verify(prepared, step, job.sandbox))
            if last or (step is not None and reports and not step.allows_next(reports[-1])):
                break
        return exit, reports

    def _agent_deadline(self, step: TaskStep | None, *, tested: bool) -> float:
        """When the agent must have ended: by the task's limit, and early enough for tests and clean-up."""
        deadline_s, now = self._config.deadline_s, self._clock()
        verify_s = (self._config.verify_s or deadline_s / 4) if tested else 0.0
        deadline = self._start + deadline_s + self._engine_s - verify_s - min(2.0, 0.05 * deadline_s)
        task_limit_s = None if step is None else step.agent_timeout_s
        if task_limit_s is not None and now + task_limit_s < deadline:
            self._time_limit = TimeLimit(task_limit_s, "agent.timeout_sec")
            return now + task_limit_s
        key = "deadline_s less verify_s" if tested else "deadline_s"
        self._time_limit = TimeLimit(deadline_s - verify_s, key)
        return deadline

    async def _run_agent(self, job: AgentJob, deadline: float) -> AgentExit | None:
        """How the agent ended; None if it ran out of time."""
        work = asyncio.ensure_future(self._context.agent.work(job))
        before_s = self._engine_s
        try:
            with self._phase("agent"):
                due: float | None = deadline
                while due is not None and not work.done():
                    await asyncio.wait({work}, timeout=max(0.0, due - self._clock()))
                    due = None if work.done() else await self._extend(job, deadline - before_s)
            if work.done():
                if self._context.run_tests:  # the engine's time is not that of the tests, or of the next step
                    await self._read_engine_time(job)
                return work.result()
            # End the session before the agent, to see whether the agent or the engine was slow.
            await self._complete(None)
            return None
        finally:
            if not work.done():
                work.cancel()
                with self._phase("teardown"):
                    await asyncio.wait({work})

    async def _extend(self, job: AgentJob, deadline: float) -> float | None:
        """When to look again, because the agent waited for its engine; None if its own time is over, or the engine's.

        `deadline` is without any engine time, that from before the agent started included.
        """
        silent_s, config = await self._read_engine_time(job), self._config
        self._engine_failure = config.engine_failure(silent_s, self._engine_s)
        left_s = deadline + self._engine_s - self._clock()
        if self._engine_failure or left_s <= 0:
            return None
        # Not in arbitrarily small steps: while the engine works, the time that is left stays the same.
        return self._clock() + max(left_s, _POLL_SHARE * config.deadline_s)

    async def _read_engine_time(self, job: AgentJob) -> float:
        """Update how long the rollout has waited for its engine; returns how long that has been silent."""
        session = await job.session.describe()
        self._engine_s = float(session.get("engine_s", 0.0))
        return float(session.get("silent_s", 0.0))

    def _blame(self, exit: AgentExit | None, completed: CompletedSession) -> Blame:
        return assign_blame(exit, completed, self._config.limits(), self._time_limit, self._engine_failure)

    async def _verify(self, prepared: PreparedTask, step: TaskStep, sandbox: SandboxInstance) -> VerifierReport:
        marker, executor, deadline_s = f"{self._marker}.tests", self._context.executor, self._config.deadline_s
        # For the tests alone, or an agent could use up their time by the number of files that it leaves.
        left_s = max(_LEAST_VERIFY_S, self._start + deadline_s + self._engine_s - self._clock())
        with self._phase("verify"):
            return await verify(
                prepared, step, sandbox, executor, self._directory, marker=marker, timeout_s=round(left_s, 2)
            )

    async def _complete(self, exit: AgentExit | None) -> CompletedSession:
        """End the session, which takes no more calls; what it recorded."""
        if self._completed is None:
            if self._session is None:
                raise GatewayLost("the session was never opened")
            reason = str(self._time_limit) if exit is None else exit.failure
            with self._phase("collect"):
                self._completed = await self._session.complete(Outcome.TRUNCATED if reason else Outcome.OK, reason)
        return self._completed

    async def _release_session(self) -> None:
        if self._session is not None and self._completed is None:
            with suppress(GatewayLost, Refusal, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._session.complete(Outcome.ABORTED, "the rollout was aborted")

    # -- the episode --------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - start

    def _episode(self, completed: CompletedSession | None, blame: Blame, evidence: dict[str, Any]) -> Episode:
        task = self._request.task
        episode = Episode(task) if completed is None else replace(completed.episode, task=task)
        for attempt in episode.attempts:
            self._phases.update(attempt.phases_s)
        # The same mapping, not a copy: the duration of the teardown is added after the episode is built.
        attempt = Attempt(0.0, self._phases, blame.outcome, blame.reason)
        return replace(
            episode,
            outcome=blame.outcome,
            fault=blame.fault,
            reason=blame.reason,
            attempts=(attempt,),
            evidence=evidence,
        )


async def _close(stack: AsyncExitStack) -> None:
    try:
        await stack.aclose()
    except Exception as error:  # noqa: BLE001  a failed clean-up must not replace the episode
        log.warning("a rollout was not cleaned up completely: %s", describe_error(error))
