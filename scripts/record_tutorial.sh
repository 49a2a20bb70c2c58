#!/usr/bin/env bash
# From a clone and an empty cache to a model that from_pretrained loads, as a newcomer goes: `make demo`, then every
# command of docs/tutorial.md on the same Kubernetes. Stores what they print, with their seconds, in
# benchmarks/results/tutorial.txt. It works in a new folder with a home of its own, so it takes some 30 minutes on two
# processors.
set -euo pipefail
result=$(cd "$(dirname "$0")/.." && pwd)/benchmarks/results/tutorial.txt
source=$(dirname "$result")/../..
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q "$source" "$work/grpo-operator"
cd "$work/grpo-operator"
export HOME=$work/home
mkdir "$HOME"
unset GRPO_CACHE GRPO_VENV VIRTUAL_ENV PYTHONPATH
python=$HOME/.cache/grpo-operator/venv/bin/python

{
  printf 'commit %s, %s processors, nothing in the cache\n' "$(git rev-parse HEAD)" "$(nproc)"
  date -u '+date %Y-%m-%d %H:%M UTC'
  printf '$ make demo\n'
  make demo 2>&1
  printf 'make demo: %d s since the start\n' "$SECONDS"
  "$python" -m pytest -s --color=no tests/e2e/test_copy.py -k tutorial 2>&1
  printf "the tutorial's commands, with what their test asks beside them: %d s since the start\n" "$SECONDS"
} | tee "$work/printed"
# Lines of progress, each package, and the folder's name say nothing.
sed -E "/^setup:    *(Downloading|Downloaded|Building|Built) /d; s#$work#...#g; s/.*\r//" "$work/printed" >"$result"
