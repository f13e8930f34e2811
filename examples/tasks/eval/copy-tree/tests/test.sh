#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
tests="${LOOPWRIGHT_TESTS_DIR:-/tests}"

passed() {
    # A link is not a copy, neither a symbolic one nor a second name of the same file.
    [ -d config ] && [ -d backup ] && [ -z "$(find config backup -type l -o -type f -links +1)" ] &&
        diff -r "$tests/expected" config > /dev/null && diff -r "$tests/expected" backup > /dev/null
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
