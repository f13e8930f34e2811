#!/bin/bash
set -e
wc -l < access.log > count.txt
