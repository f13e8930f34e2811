#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f sorted.txt ] || return  # reading a pipe would block
    [ "$(cat sorted.txt)" = "$(printf 'Ada\nAlan\nBarbara\nEdsger\nGrace\nLinus')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
