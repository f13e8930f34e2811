"""The program that the README tunes: compresses generated text and prints a ratio and a time."""

import argparse
import time
import zlib
from random import Random

parser = argparse.ArgumentParser()
parser.add_argument("--level", type=int)
parser.add_argument("--window", type=int)
options = parser.parse_args()
random = Random(7)
words = ["".join(random.choices("abcdefghijklmnop", k=random.randint(3, 9))) for _ in range(2000)]
data = " ".join(words[int(random.paretovariate(0.7)) % len(words)] for _ in range(100_000)).encode()
start_s = time.perf_counter()
compressor = zlib.compressobj(options.level, wbits=options.window)
size = len(compressor.compress(data) + compressor.flush())
print(f"ratio: {len(data) / size:.3f}")
print(f"seconds: {time.perf_counter() - start_s:.6f}")
