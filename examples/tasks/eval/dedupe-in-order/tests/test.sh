#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f unique.txt ] || return  # reading a pipe would block
    [ "$(cat unique.txt)" = "$(printf '/b\n/a\n/c\n/aa\n/d')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
