#!/bin/bash
rm peach.txt
