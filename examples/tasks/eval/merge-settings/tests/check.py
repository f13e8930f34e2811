"""Whether the file holds the right data, however it is written."""

import json
import os
from pathlib import Path

WANTED = {
    "name": "site",
    "port": 9000,
    "log": {"level": "debug", "file": {"path": "/var/log", "keep": 7}},
    "tags": ["x"],
}

try:
    file = Path("settings.json")
    good = file.is_file() and json.loads(file.read_text()) == WANTED  # reading a pipe would block
except (OSError, ValueError, RecursionError):
    good = False
(Path(os.environ["LOOPWRIGHT_VERIFIER_DIR"]) / "reward.json").write_text(json.dumps({"reward": float(good)}))
