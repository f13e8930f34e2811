#!/bin/bash
set -e
awk '$NF >= 400 { seen[$NF]++ } END { for (code in seen) print code, seen[code] }' server.log | sort -k2,2nr > errors.txt
