#!/bin/bash
set -e
cat > palindrome.py <<'END'
def is_palindrome(text):
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]
END
