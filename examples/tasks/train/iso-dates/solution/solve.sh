#!/bin/bash
set -e
awk -F/ '{ printf "%04d-%02d-%02d\n", $3, $2, $1 }' dates.txt | sort > iso.txt
