#!/usr/bin/env bash
# Checks that read files alone. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
lint-imports
python -m grpo_operator.crd --check
