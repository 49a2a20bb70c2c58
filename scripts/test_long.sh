#!/usr/bin/env bash
# The tests that are marked long. The result is stored with its commit and date. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

result=benchmarks/results/test_long.txt
scripts/setup.sh
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
status=0
flags=(--durations=0 --durations-min=1 -rA --color=no)
python -m pytest -m "long and not gpu" "${flags[@]}" "$@" 2>&1 | tee "$printed" || status=$?
{
  printf 'commit %s%s\n' "$(git rev-parse HEAD)" "$(git diff --quiet HEAD -- || printf ', with changes')"
  date -u '+date %Y-%m-%d %H:%M UTC'
  grep -E '^(recovered in|PASSED|FAILED|ERROR|=+ .*(passed|failed|error))|^ *[0-9.]+s (call|setup|teardown)' "$printed"
} >"$result"
exit "$status"
