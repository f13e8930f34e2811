#!/bin/bash
mkdir apple
