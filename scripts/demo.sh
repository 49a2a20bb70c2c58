#!/usr/bin/env bash
# Starts the demo: `demo.sh MANIFEST`. The Makefile sets the environment.
# Compiling Kubernetes takes longest and needs no Python package, so it starts first and continues in the background
# while the environment, the model and the images are made. The demo then waits for it.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p "$GRPO_CACHE"
log=$GRPO_CACHE/build.log
PYTHONPATH=devcluster "${PYTHON:-python3}" -m grpo_devcluster.binaries cluster </dev/null >"$log" 2>&1 &
compiling=$!
# The demo repeats a build that failed, and then shows why it fails.
trap 'kill "$compiling" 2>/dev/null || true' EXIT

printf 'demo: Kubernetes compiles in the background; its log is %s\n' "$log" >&2
scripts/setup.sh
python -m grpo_demo "$@"
