#!/usr/bin/env bash
# Lint, types and all tests that need neither a GPU nor long, cheap checks first. The Makefile sets the environment.
# Compiling Kubernetes needs no Python package, so it starts before the environment is set up.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }
labelled() { sed -u "s/^/[$1] /"; }

say "compiling Kubernetes in the background"
PYTHONPATH=devcluster "${PYTHON:-python3}" -m grpo_devcluster.binaries all </dev/null > >(labelled build) 2>&1 &
building=$!
imaging=
trap 'kill $building $imaging 2>/dev/null || true' EXIT

scripts/setup.sh
images() {
  python -c "from grpo_devcluster.packages import *; ensure(NODE | IMAGES | METRICS | BROWSER)"
  python -m grpo_devcluster image build-operator
}
images </dev/null > >(labelled images) 2>&1 &
imaging=$!

say "lint, import contracts, CRD drift"
scripts/lint.sh
say "types"
mypy
say "waiting for the images"
wait "$imaging"
say "waiting for the compilers"
wait "$building"
trap - EXIT

say "chart"
"$(python -m grpo_devcluster bin-dir)/helm" lint --strict charts/grpo-operator
say "tests"
# One call, so that its closing line counts all tests. More workers than tests that fill a core, as much of the time is
# waiting for processes to start; on two cores, two workers.
exec python -m pytest -n $(($(nproc) < 4 ? 2 : 3)) -m "not gpu and not long" --durations=15 "$@"
