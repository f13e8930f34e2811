#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
export LOOPWRIGHT_VERIFIER_DIR="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
exec python3 -I "${LOOPWRIGHT_TESTS_DIR:-/tests}/check.py"
