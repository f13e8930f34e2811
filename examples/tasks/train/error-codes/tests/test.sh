#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f errors.txt ] || return  # a pipe would be waited for
    [ "$(sed 's/[[:space:]]*$//' errors.txt)" = "$(printf '404 6\n500 3\n403 1')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
