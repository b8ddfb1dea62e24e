#!/bin/bash
set -e
mkdir -p /logs/verifier
trap 'if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt' EXIT
export PYTHONPATH=/app
python -m pytest -v /tests/test_solution.py
