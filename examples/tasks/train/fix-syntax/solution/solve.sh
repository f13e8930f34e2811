#!/bin/bash
set -e
cat > average.py <<'END'
def average(numbers):
    if not numbers:
        return 0
    return sum(numbers) / len(numbers)
END
