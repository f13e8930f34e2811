#!/bin/bash
mkdir melon
