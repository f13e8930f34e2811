"""The command line, one file per verb. Heavy modules are imported by the verbs that need them."""

import logging
import os
import sys

import typer

from loopwright.cli import (
    act,
    audit,
    dry_run,
    episodes,
    export,
    gateway,
    listing,
    rejudge,
    report,
    resume,
    run,
    serve_env,
    tasks,
    trials,
    verify,
)

app = typer.Typer(
    name="loopwright",
    help="A trial runtime for agents that learn by doing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (run, resume, verify, dry_run, listing, report, export, episodes, rejudge, audit, serve_env, act):
    app.command(_verb.NAME)(_verb.command)
app.add_typer(gateway.app, name=gateway.NAME)
app.add_typer(tasks.app, name=tasks.NAME)
app.add_typer(trials.app, name=trials.NAME)


@app.callback(invoke_without_command=True)
def _options(*, version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"loopwright {version_of('loopwright')}")
        raise typer.Exit


class _Log(logging.Handler):
    """Writes to what is stderr now: a live display takes its place, and would draw over what went past it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001  as logging's own handlers do
            self.handleError(record)


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 a run failed, 2 bad scenario or usage, 130 and 143 signals."""
    from loopwright.core.errors import LoopwrightError, ScenarioError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[_Log()])
    try:
        app()
    except ScenarioError as error:
        _fail(str(error), 2)
    except LoopwrightError as error:
        _fail(f"error: {error}", 1)
    except KeyboardInterrupt:
        # Before a run listens for signals there is nothing to end in good order.
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to tell, and the results are on disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)
