"""Links from the report to the logs of trials, relative, and only to what is there."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from loopwright.reports.markup import Html, html, join, number

_LISTED = 3


def trial_links(folder: Path, numbers: Sequence[int]) -> Html:
    """`trial 4 (stdout, stderr)`; of many trials the first few."""
    named = [_trial(folder, trial) for trial in numbers[:_LISTED]]
    more = html(" and {} more", number(len(numbers) - _LISTED)) if len(numbers) > _LISTED else Html("")
    word, css = ("trial", "number") if len(numbers) == 1 else ("trials", "trials")
    return html("<span class='{}'>{} {}{}</span>", css, word, join(named, ", "), more)


def _trial(folder: Path, trial: int) -> Html:
    logs = [
        # "./" keeps a folder called `javascript:` a folder.
        html("<a href='./{}'>{}</a>", quote(os.fsencode(f"{folder.name}/trials/{trial}/{log}")), log)
        for log in ("stdout", "stderr")
        if (folder / "trials" / str(trial) / log).is_file()
    ]
    return html("{} ({})", trial, join(logs, ", ")) if logs else html("{}", trial)
