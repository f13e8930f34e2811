#!/bin/bash
set -e
chmod u+x tool.sh
