#!/bin/bash
set -e
cat > search.py <<'END'
from bisect import bisect_left


def find(items, wanted):
    index = bisect_left(items, wanted)
    return index if index < len(items) and items[index] == wanted else -1
END
