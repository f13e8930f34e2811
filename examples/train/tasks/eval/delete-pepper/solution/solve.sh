#!/bin/bash
rm pepper.txt
