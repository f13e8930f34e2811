#!/bin/bash
mkdir olive
