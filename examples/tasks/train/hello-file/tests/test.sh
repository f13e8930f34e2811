#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f greeting.txt ] || return  # reading a pipe would block
    [ "$(cat greeting.txt)" = 'Hello, world!' ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
