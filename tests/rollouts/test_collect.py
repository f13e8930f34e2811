"""The collect agent: what it refuses, and what it warns of."""

import pytest
from pydantic import ValidationError

import loopwright
from loopwright.rollouts.collect import CollectConfig


def test_fewer_trials_than_a_group_are_refused():
    with pytest.raises(ValidationError, match=r"`trials` \(3\) must be at least `group_size` \(4\)"):
        CollectConfig(trials=3, group_size=4)
    assert CollectConfig(trials=4, group_size=4).trials == 4


def test_held_out_tasks_are_not_ignored_silently(tmp_path, caplog):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "2"}\n')
    run = {
        "name": "r",
        "agent": {"type": "collect", "trials": 2, "group_size": 2},
        "rollout": {
            "tasks": {"type": "jsonl", "path": "train.jsonl"},
            "loop": {"type": "single_turn"},
            "judger": {"type": "length"},
        },
        "engine": {"type": "scripted"},
        "eval": {"tasks": {"type": "jsonl", "path": "held-out.jsonl"}},
    }
    loopwright.run({"name": "s", "home": str(tmp_path), "run": [run]}, tmp_path / "out", progress=False)
    warnings = [record.message for record in caplog.records if "[run.eval]" in record.message]
    assert warnings == ["[run.eval] has no effect here: agent 'collect' evaluates nothing. Trainers use it."]
