"""Writes 5 MB of log lines: text with much repetition and some chance, the same each time."""

from pathlib import Path
from random import Random

random = Random(7)
words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(3, 10))) for _ in range(2000)]
with Path("corpus.log").open("w") as file:
    for line in range(64_000):
        text = " ".join(words[int(random.paretovariate(0.6)) % 2000] for _ in range(8))
        file.write(f"2026-01-01T{line // 3600 % 24:02}:{line // 60 % 60:02}:{line % 60:02} host{line % 17} {text}\n")
