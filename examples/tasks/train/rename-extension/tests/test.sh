#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ "$(cd notes && ls -A | sort | tr '\n' ' ')" = 'a b.txt monday.txt plan.md tuesday.txt ' ] &&
        [ -z "$(find notes/* ! -type f)" ] || return  # reading a pipe would block, and a link is not the file
    [ "$(cat 'notes/a b.txt')" = spaces ] && [ "$(cat notes/monday.txt)" = one ] &&
        [ "$(cat notes/tuesday.txt)" = two ] && [ "$(cat notes/plan.md)" = plan ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
