#!/bin/bash
set -e
cat > brackets.py <<'END'
PAIRS = {")": "(", "]": "[", "}": "{"}


def balanced(text):
    open_, quoted = [], False
    for sign in text:
        if sign == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif sign in PAIRS.values():
            open_.append(sign)
        elif sign in PAIRS and (not open_ or open_.pop() != PAIRS[sign]):
            return False
    return not open_
END
