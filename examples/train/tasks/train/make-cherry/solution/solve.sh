#!/bin/bash
mkdir cherry
