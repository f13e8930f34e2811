"""The package as a whole: what it costs to import, and what it promises by name."""

import subprocess
import sys

import pytest

import loopwright

HEAVY = {"torch", "ray", "optuna", "pandas", "numpy", "scipy", "pyarrow", "sqlalchemy"}


def imported(script: str) -> set[str]:
    """The top-level modules that a script has imported in the end."""
    tail = "\nimport sys; print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script + tail], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HELP = """
import sys
sys.argv = ["loopwright", *{words}]
from loopwright.cli import main
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    "script",
    ["import loopwright", "import loopwright.cli", HELP.format(words=["--help"]), HELP.format(words=["run", "--help"])],
    ids=["import", "cli", "help", "run --help"],
)
def test_nothing_heavy_is_imported_until_it_is_needed(script):
    assert not imported(script) & HEAVY


def test_verifying_a_scenario_imports_nothing_heavy(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        'name = "x"\n[[run]]\nname = "a"\nagent = { type = "random", trials = 2 }\n'
        'reward = { type = "identity", metrics = ["y"] }\n[run.workload]\ntype = "command"\ncommand = "echo {x}"\n'
        'metrics = { y = { regex = "(.)" } }\n[run.workload.args]\nx = [1, 2]\n'
    )
    assert not imported(HELP.format(words=["verify", str(path)])) & HEAVY


def test_without_an_extra_help_is_shown_and_the_verb_names_what_to_install():
    script = "import sys\nsys.modules['aiohttp'] = None\n"
    for words, text in (
        (["trials", "serve", "--help"], "Run trials until Ctrl-C"),
        (["trials", "serve"], "pip install 'loopwright[gateway]'"),
        (["gateway", "serve", "--relay", "--token-file", __file__], "pip install 'loopwright[gateway]'"),
    ):
        command = [sys.executable, "-c", script + HELP.format(words=words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert text in done.stdout + done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        loopwright.Nonsense  # noqa: B018
