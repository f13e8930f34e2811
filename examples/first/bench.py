"""The program that the README tunes: compresses itself and prints a ratio and a time."""

import argparse
import time
import zlib
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--level", type=int)
parser.add_argument("--window", type=int)
options = parser.parse_args()
data = Path(__file__).read_bytes() * 200
start_s = time.perf_counter()
compressor = zlib.compressobj(options.level, wbits=options.window)
size = len(compressor.compress(data) + compressor.flush())
print(f"ratio: {len(data) / size:.3f}")
print(f"seconds: {time.perf_counter() - start_s:.6f}")
