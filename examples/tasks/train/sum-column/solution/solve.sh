#!/bin/bash
set -e
awk -F, '$2 == "tea" { total += $3 } END { print total }' sales.csv > total.txt
