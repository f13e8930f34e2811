#!/bin/bash
set -e
find docs -name '*.md' -exec sed -i 's/\bcolour\b/color/g' {} +
