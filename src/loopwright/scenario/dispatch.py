"""The dispatcher: builds and starts the runs of a scenario one after another. It knows no kinds of run or agent."""

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from loopwright.agents.search.grid_random import Grid, GridConfig
from loopwright.core.agent import Agent
from loopwright.core.errors import LoopwrightError, sentence
from loopwright.core.outcome import Outcome
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer
from loopwright.reports.export import write_best, write_csv
from loopwright.reports.page import write_report
from loopwright.scenario.kinds.base import AnyEnv, BuildContext, LoadedScenario, RunKind
from loopwright.scenario.output import begin, hold
from loopwright.scenario.signals import Signals

log = logging.getLogger(__name__)

Watch = Callable[[AnyEnv], Sequence[Observer]]
"""Makes the observers of a run that is about to start."""


def dispatch(
    loaded: LoadedScenario,
    output: str | Path,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    watch: Watch = lambda _: (),
    signals: Signals | None = None,
) -> int:
    """Run a scenario. 0: every run has a result; 1: a run failed; 130, 143: stopped by a signal.

    A failure that leaves the other runs unharmed is a code, and codes accumulate: the agent's own, or a server that
    cannot be reached. Any other exception is a bug or a full disk: no further run starts, the reports are still made,
    and the exception reaches the caller unchanged.
    """
    output = Path(output)
    with (signals or Signals()).installed() as signals, hold(output):
        if not resume:
            begin(loaded, output)
        code = 0
        try:
            for run in loaded.runs:
                if signals.received is None:
                    code |= _run(loaded, run, output, signals, watch, accept_changes=accept_changes)
        finally:
            code |= write_all(output)
        return signals.exit_code or code


@dataclass
class BuiltRun:
    """A run that is ready to start."""

    env: AnyEnv
    agent: Agent
    resources: ExitStack
    """Closes the run's files."""


def build(loaded: LoadedScenario, run: RunKind, output: Path, *, accept_changes: bool = False) -> BuiltRun:
    """Build one run; if its ledger exists, the run continues from there."""
    # A run without an agent is a grid over a space of one point.
    config = run.agent or GridConfig()
    with ExitStack() as resources:
        env = run.build_env(BuildContext(loaded, output, config, resources, accept_changes))
        agent = (run.agent_class or Grid)(env, config, parallel=loaded.scenario.system.parallel)
        return BuiltRun(env, agent, resources.pop_all())


def _run(
    loaded: LoadedScenario, run: RunKind, output: Path, signals: Signals, watch: Watch, *, accept_changes: bool
) -> int:
    built = _try_build(loaded, run, output, accept_changes=accept_changes)
    if built is None:
        return 0 if _is_complete(output, run) else 1
    book = built.env.book
    book.observers.extend(watch(built.env))
    signals.book = book
    if signals.received is not None:  # it came while the run was being built
        book.stop()
    code = 0
    book.ledger.set_state("failure", None)
    try:
        code |= drive(built.agent)
        book.ledger.set_state("finished", signals.received is None)
        # A run in which nothing succeeded has no result, whatever its agent returns.
        counts = book.ledger.counts()
        code |= 0 if counts.get(Outcome.OK) or counts.get(Outcome.TRUNCATED) else 1
    except Exception as error:
        _record_failure(error, book.ledger, run.name, output)
        raise
    finally:
        signals.book = None
        built.resources.close()
    return code


def _try_build(loaded: LoadedScenario, run: RunKind, output: Path, *, accept_changes: bool) -> BuiltRun | None:
    """Build a run; None if its live server cannot be reached or used. A bug is recorded, as during the run."""
    path = output / run.name / "ledger.db"
    try:
        return build(loaded, run, output, accept_changes=accept_changes)
    except (ServerLost, ServerError) as error:
        if _is_complete(output, run):
            return None
        log.error("run %r: %s Continue with `loopwright resume`.", run.name, sentence(error))
        with Ledger.open(path) as ledger:
            ledger.set_state("failure", f"lost (infra): {error}" if isinstance(error, ServerLost) else str(error))
        return None
    except LoopwrightError:
        raise
    except Exception as error:
        with Ledger.open(path) if path.exists() else nullcontext() as ledger:
            _record_failure(error, ledger, run.name, output)
        raise


def _is_complete(output: Path, run: RunKind) -> bool:
    """Whether a live run has used its whole budget, so that it does not need its server."""
    with Ledger.read(output / run.name / "ledger.db") as ledger:
        budget = run.agent.trials if run.agent is not None else None
        return budget is not None and ledger.last()[0] >= budget and bool(ledger.state("finished"))


def drive(agent: Agent) -> int:
    """Run an agent and shut it down, whatever happens. A failing shutdown is a code and hides nothing."""
    code = 0
    try:
        code |= agent.run()
    finally:
        try:
            agent.shutdown()
        except Exception:
            log.exception("the shutdown of agent %s failed", type(agent).__name__)
            code |= 1
    return code


def _record_failure(error: Exception, ledger: Ledger | None, name: str, output: Path) -> None:
    """Write the failure where the user and the report find it. A full disk must not hide the error itself."""
    text = f"run: {name}\n\n{''.join(traceback.format_exception(error))}"
    try:
        if ledger is not None:
            ledger.set_state("failure", text)
        (output / "dse_failure.txt").write_text(text)
    except (OSError, LoopwrightError):
        log.warning("the failure could not be written to %s", output)


def write_all(output: Path) -> int:
    """Write everything that is made from the ledgers: CSV files, best.toml, report.html. Returns 1 on a failure."""
    code = 0
    for path in sorted(output.glob("*/ledger.db")):
        try:
            with Ledger.read(path) as ledger:
                write_csv(ledger, path.parent)
                write_best(ledger, path.parent / "best.toml")
        except (LoopwrightError, OSError) as error:
            log.error("%s", error)
            code = 1
    try:
        write_report(output)
    except (LoopwrightError, OSError) as error:
        log.error("%s", error)
        code = 1
    return code
