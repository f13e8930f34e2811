#!/bin/bash
mkdir carrot
