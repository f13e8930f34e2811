#!/bin/bash
set -e
LC_ALL=C sort -u names.txt > sorted.txt
