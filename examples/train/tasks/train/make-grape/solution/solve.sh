#!/bin/bash
mkdir grape
