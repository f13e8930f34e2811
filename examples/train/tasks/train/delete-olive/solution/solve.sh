#!/bin/bash
rm olive.txt
