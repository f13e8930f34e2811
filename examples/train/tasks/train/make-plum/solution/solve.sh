#!/bin/bash
mkdir plum
