"""What verbs print fits the terminal: lines are broken between words, and nothing is left out."""

import os
import subprocess
import sys
from random import Random

import pytest
from tests.survival.campaign import read_all

import loopwright as lw

SPACE = {
    "threads": [1, 2, 4, 8],
    "io_scheduler": ["mq-deadline", "none"],
    "batch_size": [8, 32],
    "compression_level": [1, 3],
    "hostile": ["plain", "\x1b[2J[bold]:smile:"],
}


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory):
    """Two campaigns, `a` and `b`, with long names and a value that holds codes for a terminal."""
    directory = tmp_path_factory.mktemp("campaigns")
    for name, seed in (("a", 1), ("b", 2)):
        noise = Random(seed)

        def measure(threads, noise=noise, **rest):
            return {"p99_latency_ms": 12.5 - threads + noise.lognormvariate(0, 0.2)}

        lw.tune(
            measure,
            SPACE,
            minimize="p99_latency_ms",
            trials=80,
            agent="random",
            seed=seed,
            output=directory / name,
            in_process=True,
            progress=False,
        )
    return directory


def screen(directory, columns, words):
    """What a terminal of this width gets."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "loopwright", *words]
    process = subprocess.Popen(command, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = read_all(ours).replace("\r\n", "\n")
    process.wait(timeout=60)
    return text


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "a", "b"],
        ["race", "a", "--agents", "random", "--seeds", "2", "--trials", "10", "--page", "race.html"],
        ["check", "a"],
    ],
    ids=lambda words: words[0],
)
def test_narrow_terminals_get_whole_words(campaigns, words):
    narrow, wide = screen(campaigns, 80, words), screen(campaigns, 400, words)
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(narrow.split()) == sorted(wide.split())
    assert "\x1b[2J" not in narrow


def test_latencies_are_shown_as_measured(campaigns):
    """Given an objective to minimise, no verb shows the reward, which is negative."""
    shown = screen(campaigns, 200, ["race", "a", "--agents", "random", "--seeds", "2", "--trials", "10"])
    assert "best recorded: −" not in shown
    assert "ms" in shown
    assert "p99_latency_ms = " in screen(campaigns, 200, ["compare", "a", "b"])


def test_compare_breaks_the_line_of_a_configuration_beside_long_numbers(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        noise = Random(seed)
        lw.tune(
            lambda level, window, noise=noise: {"score": -7.5 - level / 1e3 - window / 1e4 + noise.gauss(0, 3e-4)},
            {"level": [6, 7, 8, 9], "window": [12, 13, 14, 15]},
            minimize="score",
            trials=40,
            agent="random",
            seed=seed,
            output=tmp_path / name,
            in_process=True,
            progress=False,
        )
    text = screen(tmp_path, 80, ["compare", "a", "b"])
    table = text.partition("configuration")[2]
    assert table.count("level=") == table.count("window=") > 0
    assert all(len(word) == len("window=15") for word in table.split() if word.startswith("window"))
