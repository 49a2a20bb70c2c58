#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/*.txt. Locked versions stay; `make lock LOCK_FLAGS=--upgrade` moves them.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${GRPO_CACHE:-$HOME/.cache/grpo-operator}/uv/bin/uv
export UV_CUSTOM_COMPILE_COMMAND="make lock"

lock() {
  local out=requirements/$1.txt
  shift
  echo "lock: $out" >&2
  # No index URL: the lock holds names and hashes, and works with whatever index a machine uses.
  "$uv" pip compile -q --generate-hashes --no-emit-index-url ${LOCK_FLAGS:-} "$@" -o "$out"
}

lock uv --universal --python-version 3.11 --group uv
lock build --universal --python-version 3.11 --group build
lock operator --universal --python-version 3.11 --extra operator pyproject.toml
lock dev --universal --python-version 3.11 --extra operator --extra cpu --extra cli --extra trackers --group dev \
  --override requirements/cpu-overrides.in pyproject.toml
lock cpu --universal --python-version 3.11 --extra cpu --extra trackers --override requirements/cpu-overrides.in pyproject.toml
lock gpu --python-version 3.12 --python-platform x86_64-manylinux_2_35 --extra gpu \
  --override requirements/gpu-overrides.in pyproject.toml
# Libraries of agents, for tests alone, in folders of their own: verifiers wants an older openai than vLLM.
lock agents-verifiers --universal --python-version 3.11 - <<<'verifiers==0.4.0'
lock agents-openenv --universal --python-version 3.11 - <<<'openenv==0.10.0'
