"""Harbor's terminus-2 at one task; prints the reward, and leaves the token ids that Harbor got."""

import json
import os
import subprocess
import sys
from pathlib import Path

FILES = {
    "task.toml": '[task]\nname = "clients/calc"\n[metadata]\nneeds_image = false\n'
    '[environment]\ndocker_image = "any"\nworkdir = "/app"\n',
    "instruction.md": "fix add in calc.py",
    "environment/calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test.sh": 'python3 -c "import calc; print(int(calc.add(20, 3) == 23))" > /logs/verifier/reward.txt\n',
}
for name, text in FILES.items():
    path = Path("task", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
options = {
    "--agent": "terminus-2",
    "--model": "openai/policy",
    "--env": "loopwright.integrations.harbor_env:LocalEnvironment",
    "--path": "task",
    "--jobs-dir": "jobs",
}
kwargs = {"api_base": os.environ["OPENAI_BASE_URL"], "record_terminal_session": "false", "temperature": "1"}
if sys.argv[1].endswith("rollout_details"):
    kwargs["collect_rollout_details"] = "true"
command = [
    str(Path(sys.executable).with_name("harbor")),
    "run",
    "--yes",
    *(word for pair in options.items() for word in pair),
    *(word for name, value in kwargs.items() for word in ("--ak", f"{name}={value}")),
]
subprocess.run(command, check=True, stdout=sys.stderr)
(result,) = (json.loads(path.read_text()) for path in Path("jobs").glob("*/*/result.json"))
if result["exception_info"]:
    sys.exit(json.dumps(result["exception_info"]))
if "collect_rollout_details" in kwargs:
    (detail,) = result["agent_result"]["rollout_details"]
    pairs = list(zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True))
    Path("token_ids.json").write_text(json.dumps(pairs))
print(json.dumps(f"reward {result['verifier_result']['rewards']['reward']}"))
