"""Draws docs/terminal.svg: a real run of the quick start in a terminal."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 110


def main() -> None:
    """Run the commands in a pseudo-terminal and draw the final screen."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    console = Console(record=True, width=COLUMNS, file=StringIO())
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(HERE.parent)
        for verb in ("dry-run examples/quickstart.toml", "run examples/quickstart.toml --output out/first"):
            console.print(f"[bold green]$[/] loopwright {verb}", highlight=False)
            words = verb.replace("out/first", f"{scratch}/first").split()
            text = _on_screen([sys.executable, "-m", "loopwright", *words])
            console.print(Text.from_ansi(text.replace(f"{scratch}/first", "out/first")))
    console.save_svg(str(HERE / "terminal.svg"), title="loopwright")


def _on_screen(command: list[str]) -> str:
    """The final screen of a program; of lines that it redrew, the last state."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    output: list[bytes] = []
    with contextlib.suppress(OSError):  # reading fails once the program has closed its side
        while part := os.read(outer, 65536):
            output.append(part)
    process.wait()
    os.close(outer)
    lines = [""]
    for part in re.split(r"(\r?\n|\r|\x1b\[1A|\x1b\[2K)", re.sub(r"\x1b\[\?25[hl]", "", b"".join(output).decode())):
        match part:
            case "\n" | "\r\n":
                lines.append("")
            case "\r" | "\x1b[2K":
                lines[-1] = ""
            case "\x1b[1A":
                lines.pop()
            case _:
                lines[-1] += part
    return "\n".join(lines)


if __name__ == "__main__":
    main()
