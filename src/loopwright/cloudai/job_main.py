"""Runs a test with its hooks, and prints its metrics as the last line of its output, a JSON object.

`python -m loopwright.cloudai.job_main TEMPLATE [--pre COMMAND] [--post COMMAND] [--option TEXT] [--flag OPTION] -- …`

A failed hook before the test fails the trial, and the test does not start. Hooks write `pre_test.1.stdout` and so on.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loopwright.cloudai.templates import TRIAL_DIRECTORY, templates

_MAX_OUTPUT_BYTES = 64 * 2**20
"""How much output is read for metrics; all of it is passed on."""


def run_hooks(kind: str, commands: Sequence[str]) -> bool:
    """Run hooks one after another, each with its own files; whether all succeeded."""
    succeeded = True
    for number, command in enumerate(commands, 1):
        stdout, stderr = (Path(f"{kind}.{number}.{stream}") for stream in ("stdout", "stderr"))
        with stdout.open("wb") as output, stderr.open("wb") as errors:
            code = subprocess.run(
                ["/bin/bash", "-c", command.replace(TRIAL_DIRECTORY, str(Path.cwd()))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                check=False,
            ).returncode
        if code != 0:
            print(f"{kind} {number} ended with exit code {code}; see {stderr}", file=sys.stderr)
            succeeded = False
    return succeeded


def main(arguments: Sequence[str]) -> int:
    """Run the test; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("template", choices=list(templates))
    for option in ("--pre", "--post", "--option", "--flag"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    if not run_hooks("pre_test", parsed.pre):
        return 1
    output = bytearray()
    reading, writing = os.pipe()
    try:
        switches = {
            f"{flag}={value}": [flag] * (value == "true") for flag in parsed.flag for value in ("true", "false")
        }
        words = [part for word in parsed.command for part in switches.get(word, [word])]
        words = [word.replace(TRIAL_DIRECTORY, str(Path.cwd())) for word in words]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=writing)
    except OSError as error:
        print(f"cannot start {parsed.command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    os.close(writing)
    while block := os.read(reading, 65536):
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
        output += block[: max(0, _MAX_OUTPUT_BYTES - len(output))]
    code = process.wait()
    run_hooks("post_test", parsed.post)
    if code == 0 and (metrics := templates[parsed.template].read(output.decode(errors="replace"), parsed.option)):
        print(f"\n{json.dumps(metrics)}", flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
