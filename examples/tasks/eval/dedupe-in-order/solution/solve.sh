#!/bin/bash
set -e
awk '!seen[$0]++' urls.txt > unique.txt
