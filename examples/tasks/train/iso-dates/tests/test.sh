#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f iso.txt ] || return  # reading a pipe would block
    [ "$(cat iso.txt)" = "$(printf '1999-12-31\n2023-11-05\n2024-02-29\n2024-03-07\n2024-10-01')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
