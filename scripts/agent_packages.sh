#!/usr/bin/env bash
# Installs the locked packages of agents' libraries below FOLDER, one folder each: they do not go with those of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${GRPO_CACHE:-$HOME/.cache/grpo-operator}/uv/bin/uv
for name in verifiers openenv; do
  lock=requirements/agents-$name.txt
  cmp -s "$lock" "$1/$name/.lock" && continue
  echo "install: $lock" >&2
  rm -rf "${1:?}/$name"
  "$uv" pip install -q --require-hashes --target "$1/$name" --python "${GRPO_VENV:?}/bin/python" -r "$lock"
  cp "$lock" "$1/$name/.lock"
done
