#!/bin/bash
rm pear.txt
