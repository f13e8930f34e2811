#!/bin/bash
mkdir lemon
