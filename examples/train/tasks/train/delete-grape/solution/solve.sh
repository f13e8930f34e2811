#!/bin/bash
rm grape.txt
