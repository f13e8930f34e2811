#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f total.txt ] || return  # reading a pipe would block
    [ "$(tr -d '[:space:]' < total.txt)" = 93 ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
