#!/bin/bash
rm spinach.txt
