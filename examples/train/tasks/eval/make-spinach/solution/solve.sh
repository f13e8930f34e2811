#!/bin/bash
mkdir spinach
