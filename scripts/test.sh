#!/usr/bin/env bash
# Everything that needs no GPU, cheap checks first; what the tests need built is built beside them. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

build() {
  python -m grpo_devcluster build
  python -m grpo_devcluster image build-operator
  python -c "from grpo_devcluster import packages; packages.ensure(packages.NODE | packages.METRICS | packages.BROWSER)"
}

say "builds, beside the checks"
build </dev/null > >(sed 's/^/[build] /') 2>&1 &
building=$!
trap 'kill "$building" 2>/dev/null || true' EXIT

say "lint, import contracts, CRD drift"
scripts/lint.sh
say "types"
mypy
say "waiting for the builds"
wait "$building"
trap - EXIT

say "chart"
"$(python -m grpo_devcluster bin-dir)/helm" lint --strict charts/grpo-operator
say "tests"
# One call, so that its closing line counts all tests.
exec python -m pytest -m "not gpu" --durations=15 "$@"
