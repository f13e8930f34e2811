#!/bin/bash
rm cherry.txt
