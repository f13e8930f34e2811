#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
export LOOPWRIGHT_VERIFIER_DIR="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
# The reward until the tests have finished, also if the code under test ends them.
echo '{"reward": 0}' > "$LOOPWRIGHT_VERIFIER_DIR/reward.json"
exec python3 -I "${LOOPWRIGHT_TESTS_DIR:-/tests}/check.py"
