"""Whether a call continues the study that an output directory contains, or would mix two different ones."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopwright.core.errors import LedgerError
from loopwright.core.trial import key_of
from loopwright.scenario.kinds.base import LoadedScenario
from loopwright.scenario.overrides import override

_COMPARED = {
    "space": ("args", "env", "constraints"),
    "function": ("type", "function", "command"),
}


def check_same_study(loaded: LoadedScenario, output: Path) -> None:
    """Raise LedgerError if the output directory contains a study over another space, function or objective."""
    overrides = json.loads((output / "campaign.json").read_text()).get("set", {})
    stored = override(tomllib.loads((output / "scenario.toml").read_text()), overrides, os.environ)
    for new in loaded.raw["run"]:
        old = next((run for run in stored.get("run", ()) if run["name"] == new["name"]), None)
        if old is None:
            raise LedgerError(f"{output} contains another study, without a run {new['name']!r}. {ADVICE}")
        for what, keys in _COMPARED.items():
            if _part(old, keys) != _part(new, keys):
                raise LedgerError(f"{output} contains a study with another {what} for run {new['name']!r}. {ADVICE}")
        if key_of(old.get("reward")) != key_of(new.get("reward")):
            raise LedgerError(f"{output} contains a study with another objective for run {new['name']!r}. {ADVICE}")


ADVICE = "Its trials cannot be compared with new ones: use another output directory."


def _part(run: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    workload = run.get("workload", {})
    # An empty list in Python and a missing key in TOML are the same.
    return key_of({key: workload[key] for key in keys if workload.get(key)})
