"""The dispatcher: builds and starts the runs of a scenario one after another. It knows no kinds of run or agent.

It locks the output directory, writes what `resume` needs, and stops the run in progress when a signal comes.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from types import FrameType
from typing import Any, SupportsIndex

from loopwright.agents.search.grid_random import Grid, GridConfig
from loopwright.core.agent import Agent
from loopwright.core.errors import LedgerError, LoopwrightError, OutputBusy, StorageError, sentence, storage
from loopwright.core.outcome import Outcome
from loopwright.envs.live.server import GymServer, ServerError, ServerLost
from loopwright.envs.live.watchdog import server_calls, stack_of
from loopwright.execution.local.processes import IGNORED
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer, RunStopped, TrialBook
from loopwright.reports.export import replacing
from loopwright.reports.page import write_all
from loopwright.scenario.kinds.base import AnyEnv, BuildContext, LoadedScenario, RunKind
from loopwright.scenario.load import load as load  # the front door exports both
from loopwright.scenario.plain import PlainRuns
from loopwright.selection.recommendation import Recommendation
from loopwright.selection.trials import StoredTrial

log = logging.getLogger(__name__)
_FAILURE_FILE = "dse_failure.txt"
_SIGNAL_CODES = 128
"""From here on, an exit status means that a signal ended the process."""
_RETRY_S = 0.05
_SERVER_ERRORS = ServerLost, ServerError
_RECORDING = ("loopwright.ledger", "loopwright.envs")
"""The packages whose code must not be interrupted by an exception."""

Watch = Callable[[AnyEnv], Sequence[Observer]]
"""Makes the observers of a run that is about to start."""
Histories = dict[str, list[StoredTrial]]
"""The trials of each run that its agent has read; the report continues there."""


@dataclass
class Signals:
    """The first SIGINT, SIGTERM or SIGHUP stops a campaign cleanly, the second one at once."""

    received: int | None = None
    """The first signal."""
    books: list[TrialBook] = field(default_factory=list)
    """The trial books of the runs in progress: one, or several plain runs that run beside one another."""
    thread: int | None = None
    """The thread that is inside an agent's `run()`."""
    retrying: bool = False
    """Whether the next signal is the first one, sent again by `_try_again`."""

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Stop the run. A second signal kills all its processes and exits; the ledger stays consistent.

        An agent in its own loop, which nothing else ends, gets RunStopped there.
        """
        if self.received is not None and not self.retrying:
            for book in self.books:
                book.kill()
            if terminal := next((fd for fd in (2, 1) if os.isatty(fd)), 0):  # a live display hides the cursor
                os.write(terminal, b"\x1b[?25h\nstopped at once; continue with `loopwright resume`\n")
            os._exit(128 + number)
        self.received, self.retrying = self.received or number, False
        going_on = [book for book in list(self.books) if not book.stop()]
        if going_on and self.thread == threading.get_ident():
            recording = any(each.f_globals.get("__name__", "").startswith(_RECORDING) for each in stack_of(frame))
            # In the call of a server an exception may be raised: `LiveEnv` handles it.
            if going_on[0].is_interruptible and (not recording or any(server_calls(frame))):
                going_on[0].ledger.flush()  # before a second signal can end the process
                raise RunStopped
            threading.Thread(target=self._try_again, args=(self.thread,), daemon=True).start()

    def stop_all(self) -> None:
        """Stop the runs in progress, because another one has raised."""
        for book in list(self.books):
            book.stop()

    def _try_again(self, thread: int) -> None:
        time.sleep(_RETRY_S)
        if self.thread == thread and self.received is not None:
            self.retrying = True
            signal.pthread_kill(thread, self.received)

    @contextmanager
    def installed(self) -> Iterator["Signals"]:
        """Handle signals inside the context. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # Signals that were ignored when the process started stay ignored, as `nohup` and background jobs expect.
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) not in IGNORED]
        before = {number: signal.signal(number, self.handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def dispatch(
    loaded: LoadedScenario,
    output: str | Path,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    watch: Watch = lambda _: (),
    signals: Signals | None = None,
    server: GymServer | None = None,
    agent: Callable[..., Agent] | None = None,
    overwrite: bool = False,
    answers: dict[str, Recommendation] | None = None,
) -> int:
    """Run a scenario. 0: every run has a result; 1: a run failed; 130, 143: stopped by a signal.

    A failure that leaves the other runs unharmed is a code, and codes accumulate: the agent's own, its `sys.exit`, or a
    server that cannot be reached. Any other exception is a bug or a full disk: no further run starts, the reports are
    still made, and the exception reaches the caller unchanged. `server` replaces what a live run names, and is closed.
    `agent` is called in place of the class of each run's agent. `overwrite` deletes an earlier campaign in `output`.
    `answers` gets the recommendation of each search, as its report has it.
    """
    output, signals = Path(output), signals or Signals()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:  # as in a notebook
        how: dict[str, Any] = {"resume": resume, "accept_changes": accept_changes, "overwrite": overwrite}
        how |= {"watch": watch, "signals": signals, "server": server, "agent": agent, "answers": answers}
        return _in_thread(partial(dispatch, loaded, output, **how), signals)
    with signals.installed(), hold(output), loaded.scenario.system.session():
        if not resume:
            if overwrite:
                _delete_campaign(output)
            begin(loaded, output)
            for name, hint in loaded.hints:
                log.warning("run %r: %s: %s", name, hint.key, hint.message)
        code = 0
        histories: Histories = {}
        options: dict[str, Any] = {"accept_changes": accept_changes, "server": server, "agent": agent}

        def execute(run: RunKind, on_start: Callable[[], None]) -> int:
            return _run(loaded, run, output, signals, watch, histories, {**options, "on_start": on_start})

        try:
            if any(run.depends_on for run in loaded.runs):
                code |= PlainRuns(loaded.runs, execute).run(lambda: signals.received is not None, signals.stop_all)
            else:
                for run in loaded.runs:
                    if signals.received is None:
                        code |= _run(loaded, run, output, signals, watch, histories, options)
        finally:
            code |= write_all(output, answers=answers, histories=histories)
        if signals.received is not None:
            return 128 + signals.received
        return code if 0 <= code < _SIGNAL_CODES else 1  # a shell sees the last eight bits only


def _in_thread(work: Callable[[], int], signals: Signals) -> int:
    """Work in a thread of its own, where no event loop runs."""
    with ThreadPoolExecutor(1, "loopwright-run") as pool:
        result = pool.submit(work)
        while True:
            try:
                return result.result()
            except KeyboardInterrupt:
                if result.done():
                    raise
                signals.handle(signal.SIGINT)


@dataclass
class BuiltRun:
    """A run that is ready to start."""

    env: AnyEnv
    agent: Agent
    resources: ExitStack
    """Closes the run's files."""


def build(
    loaded: LoadedScenario,
    run: RunKind,
    output: Path,
    *,
    accept_changes: bool = False,
    server: GymServer | None = None,
    on_start: Callable[[], None] = lambda: None,
    agent: Callable[..., Agent] | None = None,
) -> BuiltRun:
    """Build one run; if its ledger exists, the run continues from there. A plain run calls `on_start` once it works."""
    # A run without an agent is a grid over a space of one point.
    config, agent_class = run.agent or GridConfig(), run.agent_class or Grid
    with ExitStack() as resources:
        context = BuildContext(
            loaded, output, config, resources, accept_changes, server, agent_class, on_start=on_start
        )
        env = run.build_env(context)
        built = (agent or agent_class)(env, config, parallel=loaded.scenario.system.parallel)
        return BuiltRun(env, built, resources.pop_all())


def _run(
    loaded: LoadedScenario, run: RunKind, output: Path, signals: Signals, watch: Watch, trials: Histories, options: Any
) -> int:
    path = output / run.name / "ledger.db"
    try:
        built = build(loaded, run, output, **options)
    except (Exception, SystemExit) as error:
        if isinstance(error, LoopwrightError) and not isinstance(error, _SERVER_ERRORS):
            raise
        with Ledger.open(path) if path.exists() else nullcontext() as ledger:
            budget = run.agent.budget if run.agent is not None else None
            is_used_up = ledger and budget is not None and ledger.last()[0] >= budget and ledger.state("finished")
            if is_used_up and isinstance(error, _SERVER_ERRORS):
                return 0  # a live run that has used its whole budget does not need its server
            if not _record_failure(error, ledger, run.name, output):
                raise
            return 1
    book = built.env.book
    book.observers.extend(watch(built.env))
    signals.books.append(book)
    if signals.received is not None:  # it came while the run was being built
        book.stop()
    code = 0
    book.ledger.set_state("failure", None)
    failure = output / _FAILURE_FILE
    if failure.exists() and failure.read_text(errors="replace").startswith(f"run: {run.name}\n"):
        failure.unlink()  # of an earlier attempt at this run
    try:
        code |= drive(built.agent, signals)
        book.when_ended()
        book.ledger.set_state("finished", signals.received is None)
        # A run in which nothing succeeded has no result, whatever its agent returns; a plain run has to succeed.
        counts = book.ledger.counts()
        code |= 0 if counts.get(Outcome.OK) or counts.get(Outcome.TRUNCATED) else 1
        if not any(counts.values()) and signals.received is None and not book.ledger.state("failure"):
            log.error("run %r: its agent ended without a trial, so there is no result", run.name)
        code |= run.agent is None and counts.get(Outcome.OK) != sum(counts.values()) - counts["cached"]
        if book.doubt and not code and signals.received is None:
            log.error("run %r: %s", run.name, book.doubt)
            book.ledger.set_state("failure", book.doubt)
            code |= 1
    except RunStopped:
        pass  # the signal decides the exit status
    except (Exception, SystemExit) as error:
        if not _record_failure(error, book.ledger, run.name, output):
            raise
        code |= 1
    finally:
        signals.books.remove(book)
        built.resources.close()
        trials[run.name] = book.history
    return code


def drive(agent: Agent, signals: Signals | None = None) -> int:
    """Run an agent and shut it down, whatever happens. A failing shutdown is a code and hides nothing."""
    code, signals = 0, signals or Signals()
    try:
        signals.thread = threading.get_ident()
        result: object = agent.run()
        if not isinstance(result, SupportsIndex):
            name = type(agent).__name__
            raise TypeError(f"{name}.run() returned {result!r}. Return 0, or another number if the run failed")
        code |= index(result)
    finally:
        signals.thread = None
        try:
            agent.shutdown()
        except (Exception, SystemExit):
            log.exception("the shutdown of agent %s failed", type(agent).__name__)
            code |= 1
    return code


def _record_failure(error: Exception | SystemExit, ledger: Ledger | None, name: str, output: Path) -> bool:
    """Write the failure where the user and the report find it. Returns whether the other runs may continue: after a
    lost server or a `sys.exit`, but not after a bug or a full disk, which must not be hidden by what is written here.
    """
    text = "".join(traceback.format_exception(error))
    others_continue = isinstance(error, (*_SERVER_ERRORS, SystemExit))
    if isinstance(error, SystemExit):
        log.error("run %r: its code called sys.exit(%r), which fails the run", name, error.code)
    elif others_continue:
        log.error("run %r: %s Continue with `loopwright resume`.", name, sentence(error))
        text = f"lost (infra): {error}" if isinstance(error, ServerLost) else str(error)
    else:
        text = f"run: {name}\n\n{text}"
    try:
        if ledger is not None:
            ledger.set_state("failure", text)
        if not others_continue:
            (output / _FAILURE_FILE).write_text(text)
    except (OSError, LoopwrightError):
        log.warning("the failure could not be written to %s", output)
    return others_continue


# -- the output directory ------------------------------------------------------------------------------------------


@contextmanager
def hold(output: Path) -> Iterator[None]:
    """Lock the directory against other processes. The lock ends with the process, however it ends."""
    with storage(output, then="nothing was started"):
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + 5.0
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            # A child that a killed process was just starting keeps the lock a moment longer than its parent lived.
            if Path(f"/proc/{holder or 'unknown'}").exists() or time.monotonic() > deadline:
                raise OutputBusy(
                    f"{output} is in use by process {holder or '(unknown)'}. Stop it, or choose another --output."
                )
            time.sleep(0.05)
        with storage(output):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def begin(loaded: LoadedScenario, output: Path) -> None:
    """Write what `resume` needs. A directory with an earlier campaign is an error."""
    if (output / "campaign.json").exists() or any(output.glob("*/ledger.db")):
        raise StorageError(
            f"{output} already contains a campaign. Continue it with `loopwright resume {output}`, choose another "
            "--output, or delete it with --overwrite."
        )
    with replacing(output / "scenario.toml") as file:
        file.write(loaded.text)
    campaign: dict[str, Any] = {"scenario": loaded.label, "home": str(loaded.directory), "started_at": time.time()}
    if loaded.overrides:
        campaign["set"] = loaded.overrides
    with replacing(output / "campaign.json") as file:
        json.dump(campaign, file, indent=2)


def _delete_campaign(output: Path) -> None:
    """Delete what an earlier campaign wrote; files of others in the same directory stay."""
    with storage(output, then="nothing was started"):
        for ledger in output.glob("*/ledger.db"):
            shutil.rmtree(ledger.parent)
        for name in ("campaign.json", "scenario.toml", "report.html", _FAILURE_FILE):
            (output / name).unlink(missing_ok=True)


def reopen(output: Path, set: Mapping[str, Any] | None = None) -> LoadedScenario:
    """The scenario of an earlier campaign, as it was then, with its directory and overrides; `set` adds to these."""
    file = output / "campaign.json"
    if not file.is_file():
        raise LedgerError(f"{output} contains no campaign. Give the --output directory of an earlier `loopwright run`.")
    try:
        campaign = json.loads(file.read_text())
        directory, overrides = Path(campaign["home"]), {**campaign.get("set", {}), **(set or {})}
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f'{file} is damaged ({error!r}); its "home" is the scenario\'s directory.') from error
    return load(output / "scenario.toml", directory=directory, set=overrides)
