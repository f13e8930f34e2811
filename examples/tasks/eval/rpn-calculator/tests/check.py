"""One case after another, each in a process of its own: what hangs or crashes fails its case, and nothing else."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import json, subprocess, sys
done = subprocess.run([sys.executable, "rpn.py", *json.loads(sys.argv[1])], capture_output=True, text=True, timeout=4)
print(json.dumps([done.stdout.strip(), done.returncode]))
"""
CASES = [
    (["3 4 + 2 *"], ["14", 0]),
    (["7"], ["7", 0]),
    (["5 1 2 + 4 * + 3 -"], ["14", 0]),
    (["7 2 /"], ["3", 0]),
    (["1 +"], ["error", 1]),
    (["1 2"], ["error", 1]),
    (["4 0 /"], ["error", 1]),
]


def passed(arguments, wanted):
    # Into a file: a pipe would be waited for as long as anything that was started holds it open.
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-c", RUN, json.dumps(arguments)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL, timeout=5)
            out.seek(0)
            return done.returncode == 0 and json.loads(out.read().splitlines()[-1]) == wanted
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return False


good = sum(passed(arguments, wanted) for arguments, wanted in CASES)
reward = good / len(CASES)
(Path(os.environ["LOOPWRIGHT_VERIFIER_DIR"]) / "reward.json").write_text(json.dumps({"reward": reward}))
