#!/bin/bash
rm melon.txt
