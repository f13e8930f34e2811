"""Slots: what parallel trials must not share."""

import json
from pathlib import Path

import pytest

import loopwright
from loopwright.core.errors import ScenarioError
from loopwright.execution.devices import visible_devices

SCRIPT = """
import json, os, sys, time
from pathlib import Path
names = "LOOPWRIGHT_SLOT", "LOOPWRIGHT_PORT", "LOOPWRIGHT_CPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
start = time.monotonic()
Path("started").touch()
while len(list(Path("..").glob("*/started"))) < 3:  # the first three run at the same time, however busy the machine is
    time.sleep(0.01)
facts = {"y": 1, "words": sys.argv[1:], **{n: os.environ[n] for n in names}}
print(json.dumps({**facts, "start": start, "end": time.monotonic()}))
"""


def scenario(**workload) -> dict:
    return {
        "name": "slots",
        "system": {"parallel": 3, "gpus": [0, 2, 5, 7]},
        "run": [
            {
                "name": "slots",
                "agent": {"type": "grid"},
                "reward": {"type": "identity", "metrics": ["y"]},
                "workload": {
                    "type": "command",
                    "command": ["python3", "script.py", "{x}", "{slot}", "{port}", "{cpus}", "{gpu}"],
                    "files": ["script.py"],
                    "metrics": {"y": {"json": "/y"}},
                    "gpus": 1,
                    "args": {"x": list(range(9))},
                    **workload,
                },
            }
        ],
    }


def test_c05_no_two_trials_share_a_device_a_port_or_a_slot_at_the_same_time(tmp_path: Path, monkeypatch):
    """Given parallel trials, those that overlap in time differ in slot, port and device; words equal variables."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    study = loopwright.run(scenario(), tmp_path / "out", progress=False)
    assert study.code == 0
    rows = [json.loads(path.read_text()) for path in (tmp_path / "out/slots/trials").glob("*/stdout")]
    assert len(rows) == 9
    for row in rows:
        assert row["words"][1:] == [row[name] for name in ("LOOPWRIGHT_SLOT", "LOOPWRIGHT_PORT", "LOOPWRIGHT_CPUS")] + [
            row["CUDA_VISIBLE_DEVICES"]
        ]
        assert row["CUDA_VISIBLE_DEVICES"] == row["ROCR_VISIBLE_DEVICES"]
        assert row["CUDA_VISIBLE_DEVICES"] in ("0", "2", "5")
    overlapping = [(a, b) for a in rows for b in rows if a is not b and a["start"] < b["end"] and b["start"] < a["end"]]
    assert overlapping
    for name in ("LOOPWRIGHT_SLOT", "LOOPWRIGHT_PORT", "CUDA_VISIBLE_DEVICES"):
        assert not [pair for pair in overlapping if pair[0][name] == pair[1][name]], name


def test_c05_more_devices_than_there_are_is_an_error_at_load_time(tmp_path: Path, monkeypatch):
    """Given trials that together need more GPUs than declared, the scenario is refused with the numbers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError, match=r"needs 2 for each of parallel = 3 trials, but \[system\] gpus has 4"):
        loopwright.load(scenario(gpus=2))
    with pytest.raises(ScenarioError, match=r"\{gpu\} needs `gpus`"):
        loopwright.load(scenario(gpus=0))


def test_c05_auto_finds_the_devices_that_a_scheduler_gave_or_the_machine_has(tmp_path: Path):
    """Given `auto`, devices come from the environment, otherwise from the device files."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert visible_devices({}, tmp_path) == ("0", "1")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}, tmp_path) == ("3", "GPU-8f")


def test_c05_several_nodes_and_a_device_named_twice_are_refused_by_name(tmp_path: Path, monkeypatch):
    """Given `nodes` above 1, a device that is listed twice or a negative number, a local system refuses them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError, match=r"\[run.workload\] nodes: more than one needs a cluster"):
        loopwright.load(scenario(nodes=[1, 2]))
    for gpus, message in (([0, 0], "names a GPU twice"), (-1, "is not a number of GPUs")):
        with pytest.raises(ScenarioError, match=message):
            loopwright.load({**scenario(), "system": {"gpus": gpus}})
