#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f 'notes/a b.txt' ] && [ -f notes/monday.txt ] && [ -f notes/plan.md ] || return  # a pipe would be waited for
    [ "$(cd notes && ls -A | sort | tr '\n' ' ')" = 'a b.txt monday.txt plan.md tuesday.txt ' ] &&
        [ "$(cat 'notes/a b.txt')" = spaces ] && [ "$(cat notes/monday.txt)" = one ] && [ "$(cat notes/plan.md)" = plan ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
