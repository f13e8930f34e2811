#!/bin/bash
rm lemon.txt
