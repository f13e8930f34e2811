#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f count.txt ] || return  # a pipe would be waited for
    [ "$(tr -d '[:space:]' < count.txt)" = 37 ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
