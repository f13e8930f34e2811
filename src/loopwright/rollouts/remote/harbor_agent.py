"""Harbor's own agents by name: programs that run in Harbor's interpreter, its own virtual environment."""

import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from loopwright.core.errors import did_you_mean

_SCRIPTS = Path(__file__).parents[2] / "integrations"
_LIST_AGENTS = "from harbor.agents.factory import AgentFactory; print(*AgentFactory.registered_names())"
_LIST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class HarborAgent:
    """One of Harbor's agents, or `module:Class` of an agent that is installed beside Harbor."""

    name: str
    prefix: Path
    """The virtual environment that Harbor is installed in."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs it, with placeholders."""
        # Safe path: what is beside the script must not take the place of installed packages.
        words = (str(self.prefix / "bin/python"), "-P", str(_SCRIPTS / "harbor_agent_main.py"), self.name)
        return (*(word.replace("{", "{{").replace("}", "}}") for word in words), "{instruction}")

    def readable(self) -> tuple[Path, ...]:
        """What it must be able to read in a sandbox: Harbor, the Python that it uses, and our script."""
        return (self.prefix, *_base_prefix(self.prefix), _SCRIPTS)

    def problem(self) -> str:
        """Why it cannot be used here, with a fix; empty if it can."""
        if not (self.prefix / "bin/python").exists():
            return (
                f"Harbor is not installed in {self.prefix}. It needs Python 3.12: "
                f"python3.12 -m venv {self.prefix} && {self.prefix}/bin/pip install harbor"
            )
        names = _agent_names(self.prefix)
        if isinstance(names, str):
            return f"Harbor in {self.prefix} cannot be used: {names}"
        if ":" in self.name or self.name in names:
            return ""
        return f"Harbor has no agent {self.name!r}. {did_you_mean(self.name, names)}"


def _base_prefix(prefix: Path) -> tuple[Path, ...]:
    """The directory of the Python that a virtual environment was made with."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return ()
    settings = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    base = Path(settings.get("home", "/")).parent
    return () if base == Path("/") else (base,)


@lru_cache(maxsize=8)
def _agent_names(prefix: Path) -> tuple[str, ...] | str:
    """The names of Harbor's agents, or why they cannot be listed."""
    argv = (prefix / "bin/python", "-P", "-c", _LIST_AGENTS)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return (lines or ["no error message"])[-1] if done.returncode else tuple(done.stdout.split())
