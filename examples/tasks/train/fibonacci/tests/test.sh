#!/bin/bash
# Harbor mounts these places; where nothing can be mounted, the variables say where they are.
export LOOPWRIGHT_VERIFIER_DIR="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"
# Until it is known better, also if the code under test ends its tests.
echo '{"reward": 0}' > "$LOOPWRIGHT_VERIFIER_DIR/reward.json"
exec python3 -I "${LOOPWRIGHT_TESTS_DIR:-/tests}/check.py"
