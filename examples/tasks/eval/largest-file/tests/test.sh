#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f largest.txt ] || return  # reading a pipe would block
    [ "$(tr -d '[:space:]' < largest.txt)" = kappa.bin ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
