#!/bin/bash
set -e
cat > rpn.py <<'END'
import sys


def value(words):
    stack = []
    for word in words:
        if word in ("+", "-", "*", "/"):
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b}[word] if word != "/" else a // b)
        else:
            stack.append(int(word))
    (result,) = stack
    return result


try:
    print(value(sys.argv[1].split()))
except (ValueError, IndexError, ZeroDivisionError):
    print("error")
    sys.exit(1)
END
