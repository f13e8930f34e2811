#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f count.txt ] || return  # reading a pipe would block
    [ "$(tr -d '[:space:]' < count.txt)" = 37 ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
