#!/bin/bash
# 1: as asked, and nothing else was touched; 0.5: there is a directory, with a longer name or not alone; otherwise 0.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
LC_ALL=C  # so that README comes first
found=(*)
directories=(spinach*/)
if [ -d spinach ] && [ "${found[*]}" = "README spinach" ]; then echo 1
elif [ -d "${directories[0]}" ]; then echo 0.5
else echo 0; fi > "$logs/reward.txt"
