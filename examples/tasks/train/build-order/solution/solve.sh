#!/bin/bash
set -e
cat > order.py <<'END'
def order(needs):
    left = {name: set(before) for name, before in needs.items()}
    for before in needs.values():
        for name in before:
            left.setdefault(name, set())
    built = []
    while left:
        ready = sorted(name for name, before in left.items() if not before)
        if not ready:
            return []
        built.append(ready[0])
        del left[ready[0]]
        for before in left.values():
            before.discard(ready[0])
    return built
END
