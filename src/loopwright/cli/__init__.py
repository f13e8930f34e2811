"""The command line, one file per verb. A verb's file is imported when the verb is used."""

import logging
import os
import sys
from importlib.metadata import version as installed_version
from typing import Any

import typer
from typer.core import TyperArgument, TyperGroup

from loopwright.core.errors import LoopwrightError, ScenarioError, printable
from loopwright.core.imports import import_with_extra

VERBS = {
    "run": ("run", "Run a scenario and print the result."),
    "resume": ("resume", "Continue a run that was stopped or killed."),
    "verify": ("verify", "Check scenarios without running them."),
    "dry-run": ("dry_run", "Show what a scenario would do, and run nothing."),
    "doctor": ("doctor", "Show what is installed, reachable and working here."),
    "convert": ("convert", "Convert CloudAI's files into a scenario."),
    "list": ("listing", "List what a scenario can name, such as agents and judgers."),
    "check": ("check", "Check the ledgers of a run for changes and damage."),
    "report": ("report", "Rebuild the report and the CSV files."),
    "export": ("export", "Export trials, episodes, training rows or steps."),
    "episodes": ("episodes", "Show rollouts and their conversations."),
    "reread": ("reread", "Read metrics again from the output of earlier trials."),
    "remeasure": ("remeasure", "Measure the recommendation of a search again."),
    "compare": ("compare", "Compare two campaigns: what changed, and by how much."),
    "race": ("race", "Race agents on a recorded search, and run nothing."),
    "rejudge": ("rejudge", "Judge stored rollouts again with another judger."),
    "audit": ("audit", "Check that what was captured is token-exact."),
    "serve-env": ("serve_env", "Serve an environment over a socket."),
    "act": ("act", "Apply a trained policy."),
    "gateway": ("gateway", "Serve an engine to any agent, and capture it token by token."),
    "tasks": ("tasks", "List and check directories of tasks."),
    "trials": ("trials", "Run trials for trainers on other machines."),
}
"""Each verb's module and its line in `loopwright --help`."""
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Verbs(TyperGroup):
    """Imports a verb's module when the verb is used, so that `--help` and the other verbs start at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # compared with a mistyped verb

    def list_commands(self, _: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, _: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = import_with_extra(f"loopwright.cli.{VERBS[cmd_name][0]}", f"`loopwright {cmd_name}`")
        verb = typer.Typer(**_STYLE)
        if hasattr(module, "app"):  # a verb with subcommands
            verb.add_typer(module.app, name=cmd_name)
            group: Any = typer.main.get_group(verb).commands[cmd_name]
            for command in group.commands.values():
                _hide_types(command)
            return group
        verb.command(cmd_name)(module.command)
        return _hide_types(typer.main.get_command(verb))

    def format_commands(self, _: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


def _hide_types(command: Any) -> Any:
    """Leave Python's types, such as `<list[Path]>`, out of the help of arguments: their names say what they are."""
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda **_: None  # type: ignore[method-assign]
    return command


app = typer.Typer(
    name="loopwright",
    cls=_Verbs,
    help="A trial runtime for agents that learn by doing.",
    no_args_is_help=True,
    **_STYLE,
)


@app.callback(invoke_without_command=True)
def _options(*, version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        typer.echo(f"loopwright {installed_version('loopwright')}")
        raise typer.Exit


class _LogHandler(logging.Handler):
    """Writes to the current stderr: a live display replaces it, and would overwrite lines that bypass it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(self.format(record)), file=sys.stderr)
        except Exception:  # noqa: BLE001  as logging's own handlers do
            self.handleError(record)


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 a run failed, 2 bad scenario or usage, 130 and 143 signals."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[_LogHandler()])
    try:
        app()
    except ScenarioError as error:
        _fail(str(error), 2)
    except LoopwrightError as error:
        _fail(f"error: {error}", 1)
    except KeyboardInterrupt:
        # Before a run listens for signals there is nothing to stop cleanly.
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output has left. The results are on disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _fail(message: str, code: int) -> None:
    print(printable(message), file=sys.stderr)
    raise SystemExit(code)
