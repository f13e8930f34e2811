#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f top.txt ] || return  # reading a pipe would block
    [ "$(sed 's/[[:space:]]*$//' top.txt)" = "$(printf 'loop\ntrial\nagent')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
