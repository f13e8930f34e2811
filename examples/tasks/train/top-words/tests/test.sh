#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f top.txt ] || return  # a pipe would be waited for
    [ "$(sed 's/[[:space:]]*$//' top.txt)" = "$(printf 'loop\ntrial\nagent')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
