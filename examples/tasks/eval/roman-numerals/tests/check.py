"""One case after another, each in a process of its own: what hangs or crashes fails its case, and nothing else."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import json, sys
sys.path.insert(0, ".")
from roman import roman
print(json.dumps(roman(*json.loads(sys.argv[1]))))
"""
CASES = [
    ([1], "I"),
    ([4], "IV"),
    ([9], "IX"),
    ([14], "XIV"),
    ([40], "XL"),
    ([90], "XC"),
    ([400], "CD"),
    ([1994], "MCMXCIV"),
    ([3999], "MMMCMXCIX"),
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
