#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f largest.txt ] || return  # a pipe would be waited for
    [ "$(tr -d '[:space:]' < largest.txt)" = kappa.bin ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
