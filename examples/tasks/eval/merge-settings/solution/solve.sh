#!/bin/bash
set -e
python3 - <<'END'
import json
def merged(base, over):
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    keys = {**base, **over}
    return {k: merged(base.get(k), over[k]) if k in over else base[k] for k in keys if k not in over or over[k] is not None}
json.dump(merged(json.load(open("base.json")), json.load(open("local.json"))), open("settings.json", "w"))
END
