"""`loopwright doctor`: what works here, with the fix for what does not."""

import json


def test_every_line_has_a_state_and_every_bad_line_a_fix(loopwright):
    done = loopwright("doctor", "--json")
    findings = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {"python", "output directory", "locks", "ledger", "file system", "disk", "clock", "slurm", "ray"} <= set(
        findings
    )
    assert all(line["fix"] for line in findings.values() if not line["ok"])
    assert done.returncode == (1 if any(line["needed"] and not line["ok"] for line in findings.values()) else 0)


def test_a_broken_output_directory_exits_with_1_and_says_why(loopwright):
    done = loopwright("doctor", "--output", "/proc/nowhere")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "choose another --output" in " ".join(done.stdout.split())


def test_an_unknown_need_is_a_usage_error(loopwright):
    assert loopwright("doctor", "--need", "slrum").returncode == 2
