#!/bin/bash
# 1: as asked, and nothing else was touched; 0.5: it is gone, and not alone; otherwise 0.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
LC_ALL=C  # so that README comes first
found=(*)
if [ "${found[*]}" = "README fig.txt" ]; then echo 1
elif [ ! -e grape.txt ]; then echo 0.5
else echo 0; fi > "$logs/reward.txt"
