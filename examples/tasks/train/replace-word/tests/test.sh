#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f docs/a.md ] && [ -f docs/deep/er/b.md ] && [ -f docs/c.txt ] || return  # reading a pipe would block
    [ "$(cat docs/a.md)" = 'The color red, the color blue; many colours.' ] && [ "$(cat docs/deep/er/b.md)" = color ] &&
        [ "$(cat docs/c.txt)" = 'colour stays' ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
