#!/bin/bash
# Harbor mounts these paths; where mounting is impossible, the variables name them.
logs="${LOOPWRIGHT_VERIFIER_DIR:-/logs/verifier}"

passed() {
    [ -f tool.sh ] && [ -x tool.sh ] && [ "$(cat tool.sh)" = "$(printf '#!/bin/bash\necho ready')" ]
}

if passed; then echo 1; else echo 0; fi > "$logs/reward.txt"
