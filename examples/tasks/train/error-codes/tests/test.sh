#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f errors.txt ] || return  # reading a pipe would block
    [ "$(sed 's/[[:space:]]*$//' errors.txt)" = "$(printf '404 6\n500 3\n403 1')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
