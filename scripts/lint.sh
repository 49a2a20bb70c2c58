#!/usr/bin/env bash
# Checks that only read files. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
lint-imports
deptry spec operator workload cli
python -m grpo_operator.api.crd --check
