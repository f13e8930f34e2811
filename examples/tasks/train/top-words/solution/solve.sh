#!/bin/bash
set -e
tr 'A-Z' 'a-z' < text.txt | tr -cs 'a-z' '\n' | grep . | sort | uniq -c | sort -k1,1nr | head -n 3 | awk '{ print $2 }' > top.txt
