#!/bin/bash
mkdir fig
