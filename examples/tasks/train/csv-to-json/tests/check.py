"""Whether the file holds the right data, however it is written."""

import json
import os
from pathlib import Path

WANTED = [
    {"name": "Ada", "age": 36, "city": "London"},
    {"name": "Grace, Rear Admiral", "age": None, "city": "New York"},
    {"name": "Alan", "age": 41, "city": ""},
]

try:
    file = Path("people.json")
    good = file.is_file() and json.loads(file.read_text()) == WANTED  # reading a pipe would block
except (OSError, ValueError, RecursionError):
    good = False
(Path(os.environ["LOOPWRIGHT_VERIFIER_DIR"]) / "reward.json").write_text(json.dumps({"reward": float(good)}))
