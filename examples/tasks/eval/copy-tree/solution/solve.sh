#!/bin/bash
set -e
cp -r config backup
