"""The dispatcher: starts the runs of a scenario one after another, and knows no kinds of agent."""

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from loopwright.core.agent import Agent
from loopwright.core.errors import LoopwrightError, sentence
from loopwright.core.outcome import Outcome
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer
from loopwright.reports.export import write_best, write_csv
from loopwright.reports.page import write_report
from loopwright.scenario.build import AnyEnv, Built, build
from loopwright.scenario.load import LoadedScenario
from loopwright.scenario.output import begin, hold
from loopwright.scenario.schema import RunConfig
from loopwright.scenario.signals import Signals

log = logging.getLogger(__name__)

Watch = Callable[[AnyEnv], Sequence[Observer]]
"""Makes the observers of a run that is about to start."""


def dispatch(
    loaded: LoadedScenario,
    output: Path,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    watch: Watch = lambda _: (),
    signals: Signals | None = None,
) -> int:
    """Run a scenario. 0: every run gave a result; 1: a run failed; 130, 143: stopped by a signal.

    A run's recoverable failure is a code that accumulates: the agent's, or that something which the run needs is not
    there. Another exception is a bug, or a disk that takes no more: no further run starts, the reports are still made,
    and it reaches the caller as it was.
    """
    with (signals or Signals()).installed() as signals, hold(output):
        if not resume:
            begin(loaded, output)
        code = 0
        try:
            for config in loaded.scenario.run:
                if signals.received is None:
                    code |= _run(loaded, config, output, signals, watch, accept_changes=accept_changes)
        finally:
            code |= write_all(output)
        return signals.exit_code or code


def _run(
    loaded: LoadedScenario, config: RunConfig, output: Path, signals: Signals, watch: Watch, *, accept_changes: bool
) -> int:
    built = _build(loaded, config, output, accept_changes=accept_changes)
    if built is None:
        return 0 if _complete(output, config) else 1
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
        # A run in which nothing succeeded has no result, whatever its agent says.
        counts = book.ledger.counts()
        code |= 0 if counts.get(Outcome.OK) or counts.get(Outcome.TRUNCATED) else 1
    except Exception as error:
        _record(error, book.ledger, config.name, output)
        raise
    finally:
        signals.book = None
        built.close()
    return code


def _build(loaded: LoadedScenario, config: RunConfig, output: Path, *, accept_changes: bool) -> Built | None:
    """Wire a run together; None if a live server is not there, or is none.

    A bug in its agent or workload is recorded like one that shows later.
    """
    path = output / config.name / "ledger.db"
    try:
        return build(loaded, config, output, accept_changes=accept_changes)
    except (ServerLost, ServerError) as error:
        if _complete(output, config):
            return None
        log.error("run %r: %s Go on with `loopwright resume`.", config.name, sentence(error))
        with Ledger.open(path) as ledger:
            ledger.set_state("failure", f"lost (infra): {error}" if isinstance(error, ServerLost) else str(error))
        return None
    except LoopwrightError:
        raise
    except Exception as error:
        with Ledger.open(path) if path.exists() else nullcontext() as ledger:
            _record(error, ledger, config.name, output)
        raise


def _complete(output: Path, config: RunConfig) -> bool:
    """Whether a live run has used its whole budget already: then nobody misses its server."""
    with Ledger.read(output / config.name / "ledger.db") as ledger:
        budget = config.agent.trials if config.agent is not None else None
        return budget is not None and ledger.last()[0] >= budget and bool(ledger.state("finished"))


def drive(agent: Agent) -> int:
    """Run an agent and shut it down, whatever happens; a failing shutdown is a code and hides nothing."""
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


def _record(error: Exception, ledger: Ledger | None, name: str, output: Path) -> None:
    """Leave the failure where the user and the report find it; a full disk must not hide the error itself."""
    text = f"run: {name}\n\n{''.join(traceback.format_exception(error))}"
    try:
        if ledger is not None:
            ledger.set_state("failure", text)
        (output / "dse_failure.txt").write_text(text)
    except (OSError, LoopwrightError):
        log.warning("the failure could not be written to %s", output)


def write_all(output: Path) -> int:
    """Everything that is made from the ledgers: CSV files, best.toml, report.html. Returns 1 if something failed."""
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
