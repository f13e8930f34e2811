#!/bin/bash
set -e
echo 'Hello, world!' > greeting.txt
