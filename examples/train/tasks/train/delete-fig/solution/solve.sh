#!/bin/bash
rm fig.txt
