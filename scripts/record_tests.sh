#!/usr/bin/env bash
# Runs tests, and stores the result in benchmarks/results/NAME.txt with its commit and date: record_tests.sh NAME
# [options of pytest]. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

result=benchmarks/results/$1.txt
shift
scripts/setup.sh
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
commit=$(git rev-parse HEAD)$(git diff --quiet HEAD -- || printf ', with changes')
status=0
flags=(--durations=0 --durations-min=1 -rA --color=no)
python -m pytest "${flags[@]}" "$@" 2>&1 | tee "$printed" || status=$?
{
  printf 'commit %s\n' "$commit"
  date -u '+date %Y-%m-%d %H:%M UTC'
  grep -E '^(Kubernetes v|recovered in|(PASSED|FAILED|ERROR) tests|=+ .*(passed|failed|error))|^ *[0-9.]+s (call|setup|teardown)' "$printed"
} >"$result"
exit "$status"
